"""Which of Megatron's flags megarl uses, which values it runs, and what it sets where nothing is said."""

import dataclasses
import functools
import pkgutil
from pathlib import Path

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from megarl.mcore.config import model_flags, optimizer_flags

# Attributes that change what a model computes, also where a folder's flags leave their defaults.
ARCHITECTURE = model_flags.attributes().union(
    """
    num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention num_query_groups kv_channels
    swiglu squared_relu quick_geglu normalization layernorm_epsilon add_bias_linear add_qkv_bias qk_layernorm
    position_embedding_type rotary_base rotary_percent rotary_seq_len_interpolation_factor use_rope_scaling
    rope_scaling_factor no_rope_freq untie_embeddings_and_output_weights num_experts moe_layer_freq
    moe_ffn_hidden_size moe_router_topk moe_latent_size moe_router_pre_softmax moe_router_score_function
    moe_router_enable_expert_bias moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk
    moe_shared_expert_intermediate_size moe_shared_expert_gate use_rotary_position_embeddings
    layernorm_zero_centered_gamma activation_func_clamp_value glu_linear_offset window_size window_attn_skip_freq
    softmax_type yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow
    yarn_correction_range_round_to_int rotary_scaling_factor mscale mscale_all_dim multi_latent_attention
    q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim experimental_attention_variant
    linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
    linear_num_value_heads attention_output_gate hybrid_layer_pattern mamba_state_dim mamba_head_dim
    mamba_num_groups mamba_num_heads dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
    dsa_indexer_rope_interleaved
    """.split()
)
# Read by megarl (or by Megatron's own translation of arguments into configs) besides the fields of the configs.
READ_BY_MODEL = ARCHITECTURE.union(
    """
    bias_gelu_fusion bias_swiglu_fusion make_vocab_size_divisible_by max_position_embeddings no_persist_layer_norm
    recompute_activations pretrained_checkpoint num_layers_per_virtual_pipeline_stage
    num_virtual_stages_per_pipeline_rank decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
    delta_rule_backend
    """.split()
)
READ_BY_SCHEDULER = set(
    """
    lr_decay_iters lr_decay_style lr_warmup_fraction lr_warmup_init lr_warmup_iters lr_wsd_decay_iters
    lr_wsd_decay_style start_weight_decay end_weight_decay weight_decay_incr_style override_opt_param_scheduler
    use_checkpoint_opt_param_scheduler
    """.split()
)
READ_BY_DDP = set("accumulate_allreduce_grads_in_fp32 ddp_bucket_size use_torch_fsdp2".split())
READ_BY_PROGRAM = {"distributed_timeout_minutes"}
READ_BY_TRAINER = {"profile_ranks"}


def _modules(folder: str) -> tuple[str, ...]:
    """Names of the modules in a folder of mcore, by their files: this package must not import the models."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parents[1] / folder)])))


LAYER_SPECS = _modules("model/layer_specs")
ATTENTION_BACKENDS = _modules("attention/backends")

# A destination of the parser -> the only value this version runs, and why a wrong answer would be worse than a refusal.
ONLY = {
    "transformer_impl": (LAYER_SPECS, "there is no such layer spec in mcore/model/layer_specs"),
    "fp8": (None, "packed micro-batches and decode steps have any number of tokens, fp8 products a multiple of 16"),
    "fp4": (None, "fp4 is not supported yet"),
    "attention_dropout": (0.0, "dropout would make log-probs of one text differ"),
    "hidden_dropout": (0.0, "dropout would make log-probs of one text differ"),
    "cuda_graph_impl": ("none", "CUDA graphs of decode steps are those of --decode-graphs, and training has none"),
    "use_megatron_fsdp": (False, "sharded parameters are those of --use-torch-fsdp2"),
    "moe_router_force_load_balancing": (False, "it would route at random"),
    "moe_router_force_biased": (None, "it would route at random"),
    "moe_input_jitter_eps": (None, "noise would make log-probs of one text differ"),
    "moe_expert_capacity_factor": (None, "tokens dropped depend on what is batched with them"),
    "moe_expert_rank_capacity_factor": (None, "tokens dropped depend on what is batched with them"),
    "moe_enable_routing_replay": (False, "--router-replay says which routes are replayed"),
    "moe_router_fusion": (False, "the fused router bypasses recording and replay"),
    "moe_token_dispatcher_type": (("alltoall", "allgather"), "tokens of experts travel by torch's collectives"),
    "moe_enable_deepep": (False, "tokens of experts travel by torch's collectives"),
    "batch_invariant_mode": (False, "it replaces kernels that megarl does not use"),
    "moe_router_padding_for_fp8": (False, "it is for fp8"),
    "moe_router_padding_for_quantization": (False, "it is for fp8"),
    "moe_single_grouped_weight": (False, "checkpoints and weight transfer have a weight of each expert"),
    "moe_single_grouped_bias": (False, "checkpoints and weight transfer have a bias of each expert"),
    "experimental_attention_variant": ((None, "gated_delta_net"), "other kinds of attention are not supported yet"),
    "hybrid_context_parallel": (False, "the packed stream is cut evenly over context-parallel ranks"),
    "hierarchical_context_parallel_sizes": (None, "the packed stream is cut evenly over context-parallel ranks"),
    "rotary_interleaved": (False, "rotary embeddings of packed tokens are not interleaved"),
    "qk_l2_norm": (False, "norms of queries and keys are those of --qk-layernorm"),
    "qk_clip": (False, "clipping of attention logits is not supported yet"),
    "fine_grained_activation_offloading": (False, "what is offloaded is said by --offload"),
    "use_mup": (False, "μP is not supported yet"),
    "defer_embedding_wgrad_compute": (False, "it needs Megatron's own output layer and loss"),
    "delay_wgrad_compute": (False, "weight gradients are computed in their own backward"),
    "overlap_dispatch_backward_with_experts_wgrad": (False, "weight gradients are computed in their own backward"),
    "overlap_moe_expert_parallel_comm": (False, "it needs a schedule plan of Megatron's own model and loss"),
    "distribute_saved_activations": (False, "saved activations are divided by --sequence-parallel"),
    "pipeline_model_parallel_layout": (
        None,
        "stages are those of --decoder-first-pipeline-num-layers, …-last-…, and virtual stages",
    ),
    "fp32_residual_connection": (False, "a norm of a decode step has one type for hidden states and weights"),
    "config_logger_dir": ("", "settings.yaml in --save has every flag"),
    "symmetric_ar_type": (None, "all-reduces in symmetric memory are not supported yet"),
    "overlap_param_gather": (False, "weights are read right after an update, by rollout, scoring and checkpoints"),
    "overlap_param_gather_with_optimizer_step": (False, "weights are read right after an update"),
    "position_embedding_type": (
        ("rope", "yarn", "learned_absolute", "none"),
        "other position embeddings are not supported",
    ),
    "optimizer": (("adam", "sgd", "muon", "dist_muon"), "other optimizers are not supported yet"),
    "muon_scalar_optimizer": ("adam", "vectors, embeddings and heads are trained by Adam"),
    "mtp_num_layers": (None, "a model has one layer of multi-token prediction, that of --mtp-train and --mtp-drafts"),
    "num_distributed_optimizer_instances": (1, "one optimizer instance is supported"),
}

# Families of flags for parts that megarl's models, optimizer and engine do not have.
FOREIGN = tuple(
    """
    dsa_ mamba_ mtp_ lion_ fp4_ fp8_ mup_ tp_comm_ inference_ megatron_fsdp_ fsdp_ moe_paged_ moe_hybridep_
    moe_deepep_ moe_ncclep_ moe_flex_ kitchen_ use_kitchen qk_clip_ moe_router_quantile_ cuda_graph_ gtp_
    """.split()
)

# Fields of Megatron's configs that nothing reads on megarl's path, or only code for parts that megarl does not have.
WITHOUT_EFFECT = {
    # CUDA graphs, Transformer Engine, fp8, fused kernels of Megatron's own loss and layers
    "enable_cuda_graph", "external_cuda_graph", "optimizer_cuda_graph", "moe_pad_experts_for_cuda_graph_inference",
    "use_te_activation_func", "use_transformer_engine_op_fuser", "reuse_grad_buf_for_mxfp8_param_ag",
    "keep_fp8_transpose_cache", "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
    "cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "use_fused_weighted_squared_relu",
    "fused_residual_rmsnorm", "use_grouped_gemm_for_dense_mlp", "use_grouped_gemm_for_shared_expert",
    "disable_bf16_reduced_precision_matmul", "wgrad_deferral_limit",
    # attention: megarl's backends take softmax in fp32, and cut the packed stream over context-parallel ranks
    "flash_decode", "flash_attention_version", "apply_query_key_layer_scaling", "attention_softmax_in_fp32",
    "cp_comm_type", "max_seqlen_per_dp_cp_rank", "mrope_section", "test_mode",
    # layers
    "apply_residual_connection_post_layernorm", "is_hybrid_model", "use_mamba_mem_eff_path",
    # experts: own permutation and products; no tokens are dropped
    "moe_apply_probs_on_input", "moe_per_layer_logging", "moe_token_drop_policy", "moe_mlp_glu_interleave_size",
    "moe_shared_expert_glu_interleave_size", "moe_permute_fusion_into_hybridep", "high_priority_a2a_comm_stream",
    # offload is --offload, sharding is --use-torch-fsdp2
    "cpu_offloading_num_layers", "cpu_offloading_retain_pinned_cpu_buffers", "offload_modules",
    "min_offloaded_tensor_size", "delay_offload_until_cuda_graph", "delta_offload_bytes_across_pp_ranks",
    "activation_offload_fraction", "fine_grained_offloading_max_inflight_offloads", "init_model_with_meta_device",
    "data_parallel_sharding_strategy", "outer_dp_sharding_strategy", "suggested_communication_unit_size",
    "disable_symmetric_registration", "gradient_reduce_div_fusion", "tensor_parallel_num_weight_shards",
    "expert_tensor_parallel_num_weight_shards",
    # communication
    "align_param_gather", "pipeline_model_parallel_comm_backend", "use_ring_exchange_p2p",
    "nccl_all_reduce_for_prefill",
    # optimizer: fp32 weights and gradients; the host's Adam is torch's, and sends weights in the gradients' memory
    "main_params_dtype", "main_grads_dtype", "use_torch_optimizer_for_cpu_offload", "pin_cpu_params",
    # measurements of Megatron's training loop
    "log_num_zeros_in_grad", "barrier_with_L1_time",
}  # fmt: skip

DEFAULTS = """
    --micro-batch-size 1 --transformer-impl local --no-rope-fusion --no-persist-layer-norm
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion --attention-dropout 0 --hidden-dropout 0 --attention-backend auto
    --position-embedding-type rope --tokenizer-type NullTokenizer --lr 1e-5 --global-batch-size 64
    --calculate-per-token-loss --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall
    --no-check-for-nan-in-loss-and-grad --muon-tp-mode duplicated
""".split()


@functools.cache
def training() -> frozenset[str]:
    """Attributes that only a role that learns has a use for: of optimizer, schedule and gradient buffers."""
    fields = {f.name for config in (OptimizerConfig, DistributedDataParallelConfig) for f in dataclasses.fields(config)}
    model = {field.name for field in dataclasses.fields(TransformerConfig)} | {"use_torch_fsdp2"}  # a reference shards
    return frozenset((fields | READ_BY_SCHEDULER | READ_BY_DDP | READ_BY_TRAINER | optimizer_flags.ATTRIBUTES) - model)


@functools.cache
def used() -> frozenset[str]:
    """Attributes that change what megarl does; a flag for any other is refused."""
    configs = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    fields = {field.name for config in configs for field in dataclasses.fields(config)}
    ours = {name for name in fields if name in ONLY or not name.startswith(FOREIGN)} - WITHOUT_EFFECT
    read = READ_BY_MODEL | READ_BY_SCHEDULER | READ_BY_DDP | READ_BY_PROGRAM | READ_BY_TRAINER
    return frozenset(ours | model_flags.attributes() | optimizer_flags.ATTRIBUTES | read)
