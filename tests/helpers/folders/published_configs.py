"""config.json of published models, and the parameters of their checkpoints."""


def llama3(layers: int, hidden: int, ffn: int, heads: int, factor: float, head_dim: int = 128, tied: bool = False):
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    return {
        "model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn,
        "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": head_dim, "vocab_size": 128256,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_scaling": scaling, "tie_word_embeddings": tied,
        "max_position_embeddings": 131072,
    }  # fmt: skip


def qwen(kind: str, layers: int, hidden: int, ffn: int, heads: int, groups: int, tied: bool = False, **fields):
    return {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn,
        "num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": 151936, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "tie_word_embeddings": tied, "max_position_embeddings": 40960,
    } | ({} if kind == "qwen2" else {"head_dim": 128, "attention_bias": False}) | fields  # fmt: skip


EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
           "mlp_only_layers": []}  # fmt: skip
BIG = {"vocab_size": 152064}
YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096}  # fmt: skip
LATENT = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
          "v_head_dim": 128, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
          "attention_bias": False, "moe_layer_freq": 1, "tie_word_embeddings": False}  # fmt: skip
# config.json, and parameters of the checkpoint; without the correction biases of DeepSeek's routers.
PUBLISHED = {
    "qwen2.5_0.5b": (qwen("qwen2", 24, 896, 4864, 14, 2, True), 494_032_768),
    "qwen2.5_1.5b": (qwen("qwen2", 28, 1536, 8960, 12, 2, True), 1_543_714_304),
    "qwen2.5_3b": (qwen("qwen2", 36, 2048, 11008, 16, 2, True), 3_085_938_688),
    "qwen2.5_7b": (qwen("qwen2", 28, 3584, 18944, 28, 4, **BIG), 7_615_616_512),
    "qwen2.5_14b": (qwen("qwen2", 48, 5120, 13824, 40, 8, **BIG, rms_norm_eps=1e-5), 14_770_033_664),
    "qwen2.5_32b": (qwen("qwen2", 64, 5120, 27648, 40, 8, **BIG, rms_norm_eps=1e-5), 32_763_876_352),
    "qwen2.5_72b": (qwen("qwen2", 80, 8192, 29568, 64, 8, **BIG, rms_norm_eps=1e-5), 72_706_203_648),
    "qwen3_0.6b": (qwen("qwen3", 28, 1024, 3072, 16, 8, True), 596_049_920),
    "qwen3_1.7b": (qwen("qwen3", 28, 2048, 6144, 16, 8, True), 1_720_574_976),
    "qwen3_4b": (qwen("qwen3", 36, 2560, 9728, 32, 8, True), 4_022_468_096),
    "qwen3_8b": (qwen("qwen3", 36, 4096, 12288, 32, 8), 8_190_735_360),
    "qwen3_14b": (qwen("qwen3", 40, 5120, 17408, 40, 8), 14_768_307_200),
    "qwen3_32b": (qwen("qwen3", 64, 5120, 25600, 64, 8), 32_762_123_264),
    "qwen3_30b_a3b": (qwen("qwen3_moe", 48, 2048, 6144, 32, 4, **EXPERTS, moe_intermediate_size=768), 30_532_122_624),
    "qwen3_235b_a22b": (
        qwen("qwen3_moe", 94, 4096, 12288, 64, 4, **EXPERTS, moe_intermediate_size=1536), 235_093_634_560,
    ),
    "qwen3_next_80b_a3b": (
        qwen("qwen3_next", 48, 2048, 5120, 16, 2, head_dim=256, partial_rotary_factor=0.25, rope_theta=10000000,
             linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
             linear_value_head_dim=128, full_attention_interval=4, num_experts=512, num_experts_per_tok=10,
             moe_intermediate_size=512, shared_expert_intermediate_size=512, norm_topk_prob=True,
             decoder_sparse_step=1, mlp_only_layers=[], max_position_embeddings=262144), 79_674_391_296,
    ),
    "kimi_linear_48b": (
        {"model_type": "kimi_linear", "num_hidden_layers": 27, "hidden_size": 2304, "intermediate_size": 9216,
         "moe_intermediate_size": 1024, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72,
         "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
         "mla_use_nope": True, "linear_attn_config": {
             "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
             "kda_layers": [i for i in range(1, 27) if i % 4], "short_conv_kernel_size": 4},
         "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "first_k_dense_replace": 1,
         "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 1,
         "topk_group": 1, "use_grouped_topk": True, "routed_scaling_factor": 2.446, "rms_norm_eps": 1e-5,
         "rope_theta": 10000.0, "vocab_size": 163840, "hidden_act": "silu", "tie_word_embeddings": False,
         "num_nextn_predict_layers": 0, "model_max_length": 1048576}, 49_122_681_728 - 26 * 256,
    ),
    "llama3.2_1b": (llama3(16, 2048, 8192, 32, 32.0, 64, True), 1_235_814_400),
    "llama3.2_3b": (llama3(28, 3072, 8192, 24, 32.0, tied=True), 3_212_749_824),
    "llama3.1_8b": (llama3(32, 4096, 14336, 32, 8.0), 8_030_261_248),
    "llama3.1_70b": (llama3(80, 8192, 28672, 64, 8.0), 70_553_706_496),
    "llama3.1_405b": (llama3(126, 16384, 53248, 128, 8.0), 405_853_388_800),
    "mixtral_8x7b": (
        {"model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "rms_norm_eps": 1e-5,
         "rope_theta": 1000000.0, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
         "tie_word_embeddings": False, "max_position_embeddings": 32768}, 46_702_792_704,
    ),
    "deepseek_v3": (
        LATENT | {"num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432,
                  "moe_intermediate_size": 2048, "num_attention_heads": 128, "num_key_value_heads": 128,
                  "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5, "q_lora_rank": 1536,
                  "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
                  "rms_norm_eps": 1e-6, "rope_theta": 10000, "rope_scaling": YARN, "vocab_size": 129280,
                  "max_position_embeddings": 163840}, 671_026_419_200 - 58 * 256,
    ),
    "moonlight_16b_a3b": (
        LATENT | {"num_hidden_layers": 27, "hidden_size": 2048, "intermediate_size": 11264,
                  "moe_intermediate_size": 1408, "num_attention_heads": 16, "num_key_value_heads": 16,
                  "n_shared_experts": 2, "n_routed_experts": 64, "routed_scaling_factor": 2.446, "q_lora_rank": None,
                  "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
                  "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "vocab_size": 163840,
                  "max_position_embeddings": 8192}, 15_960_110_208 - 26 * 64,
    ),
}  # fmt: skip
# DeepSeek-V3.2: the sizes of V3, and indexers with 64·128·1536 + 128·7168 + 2·128 + 64·7168 numbers in each layer.
_V3, _PARAMETERS = PUBLISHED["deepseek_v3"]
PUBLISHED["deepseek_v3.2"] = (
    _V3 | {"model_type": "deepseek_v32", "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128},
    _PARAMETERS + 851_524_864,
)
# GLM-5 (2602.15763), whose layers all have indexers: 78·(32·128·2048 + 128·6144 + 2·128 + 32·6144) numbers.
_SIZES = {"num_hidden_layers": 78, "hidden_size": 6144, "intermediate_size": 12288, "num_attention_heads": 64}
_LATENTS = {"num_key_value_heads": 64, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "head_dim": 64}
_INDEXERS = {"index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128, "indexer_types": ["full"] * 78}
_REST = {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5, "rope_theta": 1000000, "rope_scaling": None}
_READS = {"model_type": "glm_moe_dsa", "vocab_size": 154880, "max_position_embeddings": 202752}
PUBLISHED["glm_5"] = (_V3 | _SIZES | _LATENTS | _INDEXERS | _REST | _READS, 743_180_190_720 + 731_008_512)
