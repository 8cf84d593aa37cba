"""Which tensors belong to multi-token prediction: by the number of a layer, or by a prefix of their own."""

from megarl.mcore.weights.hf.family import NO_PREDICTION, PREDICTION_LAYERS, PREDICTION_MODULE
from megarl.mcore.weights.hf.prediction import PredictionTensors


def test_layers_after_those_of_the_model():
    found = PredictionTensors(PREDICTION_LAYERS, range(61, 62), is_kept=True)
    assert found.has("model.layers.61.eh_proj.weight") and found.has("model.layers.61.mlp.experts.7.up_proj.weight")
    assert not any(map(found.has, ("model.layers.60.enorm.weight", "model.layers.62.enorm.weight", "model.layers.61")))
    assert found.copied("model.layers.61.embed_tokens.weight") == "model.embed_tokens.weight"
    assert found.copied("model.layers.61.shared_head.head.weight") == "lm_head.weight"
    assert found.copied("model.layers.61.shared_head.norm.weight") is None
    assert found.copied("model.layers.60.embed_tokens.weight") is None
    assert found.without({"num_nextn_predict_layers": 1, "a": 2}) == {"num_nextn_predict_layers": 0, "a": 2}
    assert found.without({}) == {"num_nextn_predict_layers": 0}


def test_a_prefix_of_their_own():
    found = PredictionTensors(PREDICTION_MODULE, range(4, 4), is_kept=False)
    assert found.has("mtp.fc.weight") and found.has("mtp.layers.0.mlp.gate.weight")
    assert not found.has("model.layers.4.mtp.weight") and found.copied("mtp.fc.weight") is None
    assert found.note(["mtp.fc.weight", "lm_head.weight"]) is not None


def test_families_without_any():
    found = PredictionTensors(NO_PREDICTION, range(3, 3), is_kept=True)
    assert not found.has("model.layers.3.eh_proj.weight") and found.note(["model.layers.3.eh_proj.weight"]) is None
