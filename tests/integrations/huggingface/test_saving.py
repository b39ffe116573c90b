"""Laws are saved, loaded and trained with their model by transformers, Accelerate and PEFT."""

import copy
import functools
import json
import math
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from isentropic import laws

pytest.importorskip("minilm", reason="safetensors or tokenizers is not installed")
pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
peft = pytest.importorskip("peft", reason="PEFT is not installed")

import torch  # noqa: E402
from tiny_models import SIZES, batch, close, decoder, encoder_decoder, outputs  # noqa: E402

from isentropic.integrations import huggingface  # noqa: E402
from isentropic.integrations.huggingface import _interface, _saving  # noqa: E402
from isentropic.integrations.huggingface._layer_law import LayerLaw  # noqa: E402
from isentropic.integrations.torch import LawModule, MultiheadAttention  # noqa: E402
from isentropic.laws._formulas import InfoScale, StepLog  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

FIRST, SECOND = (f"model.layers.{i}.self_attn" for i in range(2))
PER_HEAD = np.asarray([0.2, 0.5, 0.8, 1.1])
FROZEN = {
    "one number": laws.LogLength(4),
    "per head": laws.AffineLog(PER_HEAD, 0.5, minimum=np.full(4, 0.1)),
    "per layer": [laws.AffineLog(0.7, PER_HEAD), laws.scaled(laws.shifted(laws.LogLength(4), 1), PER_HEAD)],
    "one layer": {1: laws.Knots([2, 4, 8], PER_HEAD[:, None] + np.asarray([1.0, 1.1, 1.3]))},
}  # fmt: skip


def randomized(model):
    """With law parameters as training may leave them."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "isentropic_law" in name:
                x += torch.rand(x.shape, generator=generator)
    return model


def law_names(model):
    return [name for name in model.state_dict() if "isentropic_law" in name]


def entry(folder):
    return json.loads((folder / "config.json").read_text()).get("isentropic_laws")


def run(code):
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)


class TestSaved:
    @pytest.mark.parametrize("own", FROZEN.values(), ids=FROZEN)
    @pytest.mark.parametrize("count", ["keys", "positions"])
    def test_round_trip(self, tmp_path, own, count):
        model = decoder("Mistral")
        standard, names = outputs(model, batch()), set(model.state_dict())
        huggingface.use(model, own, count=count)
        expected = outputs(model, batch())
        assert (expected - standard).abs().max() > 0.1
        assert set(model.state_dict()) == names
        model.save_pretrained(tmp_path)
        for kind in (transformers.AutoModelForCausalLM, transformers.MistralForCausalLM):
            again = kind.from_pretrained(tmp_path)
            assert torch.equal(outputs(again, batch()), expected)
            assert huggingface.laws_of(again) == huggingface.laws_of(model)
        assert again.config._attn_implementation == "isentropic"

    def test_saved_again(self, tmp_path):
        model = decoder("Llama")
        huggingface.use(model, FROZEN["per layer"])
        model.save_pretrained(tmp_path / "first")
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "first")
        again.config.save_pretrained(tmp_path / "configuration")
        again.save_pretrained(tmp_path / "second")
        first, *others = (
            json.loads((tmp_path / name / "config.json").read_text())
            for name in ("first", "configuration", "second")
        )
        assert first["attn_implementation"] == "isentropic"
        assert others == [first, first]

    def test_fresh_process(self, tmp_path):
        model = decoder("Llama")
        huggingface.use(model, FROZEN["per layer"])
        model.save_pretrained(tmp_path)
        (tmp_path / "expected.txt").write_text(str(outputs(model, batch()).double().sum().item()))
        torch.save(batch()["input_ids"], tmp_path / "ids.pt")
        code = f"""
import torch, transformers
def load():
    return transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})

try:  # without the import it must not compute something else in silence
    load()
except ValueError as error:
    print(error)
else:
    print("no error")

import isentropic.integrations.huggingface
ids = torch.load({str(tmp_path / "ids.pt")!r})
print(load()(ids, attention_mask=torch.ones_like(ids)).logits.detach().double().sum().item())
"""
        got = run(code)
        assert got.returncode == 0, got.stderr
        *refusal, total = got.stdout.splitlines()
        assert 'Specified `attn_implementation="isentropic"` is not supported' in "\n".join(refusal)
        expected = float((tmp_path / "expected.txt").read_text())
        assert float(total) == pytest.approx(expected, abs=1e-3)

    @pytest.mark.parametrize("trainable", [False, "head"])
    def test_with_another_head_or_none(self, tmp_path, trainable):
        model = decoder("Llama")
        huggingface.use(
            model, FROZEN["one number" if not trainable else "per head"], trainable=trainable
        )
        randomized(model)
        inputs = batch()
        model.save_pretrained(tmp_path / "whole")
        base = transformers.AutoModel.from_pretrained(tmp_path / "whole")
        with torch.no_grad():
            expected = model.model(**inputs)[0]
            assert torch.equal(base(**inputs)[0], expected)
            base.save_pretrained(tmp_path / "base")
            options = {"num_labels": 3}
            classifier = transformers.AutoModelForTokenClassification.from_pretrained(
                tmp_path / "base", **options
            )
            assert torch.equal(classifier.model(**inputs)[0], expected)

    @pytest.mark.parametrize("trainable", [False, True])
    def test_shards(self, tmp_path, trainable):
        model = decoder("Llama", tie_word_embeddings=True)
        huggingface.use(model, laws.AffineLog(PER_HEAD), trainable=trainable)
        expected = outputs(randomized(model), batch())
        model.save_pretrained(tmp_path, max_shard_size="20KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(outputs(again, batch()), expected)

    def test_device_map_and_precision(self, tmp_path):
        model = decoder("Llama")
        huggingface.use(model, [laws.AffineLog(np.full(4, 1 / 3)), None])
        model.save_pretrained(tmp_path)
        again = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, device_map={"": "cpu"}, dtype=torch.bfloat16
        )
        law, _ = huggingface.laws_of(again)[FIRST]
        assert law.slope.dtype == torch.float32
        assert law == laws.AffineLog(np.full(4, np.float32(1 / 3)))

    @pytest.mark.parametrize("trainable", [False, "head"])
    def test_pickle_and_copy(self, tmp_path, trainable):
        model = decoder("Llama")
        huggingface.use(model, FROZEN["per head"], trainable=trainable)
        expected = outputs(randomized(model), batch())
        torch.save(model, tmp_path / "model.pt")
        torch.save(model.state_dict(), tmp_path / "state.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        twin = copy.deepcopy(model)
        huggingface.use(model, None)
        fresh = decoder("Llama")
        huggingface.use(fresh, FROZEN["per head"], trainable=trainable)
        fresh.load_state_dict(torch.load(tmp_path / "state.pt"))
        rebuilt = transformers.AutoModelForCausalLM.from_config(twin.config)
        rebuilt.load_state_dict(twin.state_dict())
        for other in (loaded, twin, fresh, rebuilt.eval()):
            assert torch.equal(outputs(other, batch()), expected)

    @pytest.mark.parametrize("ends", ["by use", "by a block"])
    def test_trained_laws_are_not_loaded_into_a_model_without(self, ends):
        trained, model = with_scales(), decoder("Llama")
        if ends == "by use":
            huggingface.use(model, laws.AffineLog(0.3), trainable=True)
            huggingface.use(model, None)
        else:
            huggingface.use(model, None)
            with huggingface.use(model, laws.AffineLog(0.3), trainable=True):
                pass
        names = sorted(law_names(trained))
        with pytest.raises(RuntimeError, match=f'Unexpected key.*"{names[0]}"'):
            model.load_state_dict(trained.state_dict())
        assert (
            sorted(model.load_state_dict(trained.state_dict(), strict=False).unexpected_keys) == names
        )
        huggingface.use(model, laws.AffineLog(0.3), trainable="head")
        model.load_state_dict(trained.state_dict())

    @pytest.mark.parametrize("name", ["T5", "Bart"])
    @pytest.mark.parametrize("part", ["all", "encoder"])
    @pytest.mark.filterwarnings("ignore:.*because its model has no laws:UserWarning")
    def test_encoder_and_decoder(self, tmp_path, name, part):
        model = encoder_decoder(name)
        inputs = batch("right") | {"decoder_input_ids": batch(length=7)["input_ids"]}
        used = model if part == "all" else model.get_encoder()
        huggingface.use(used, laws.AffineLog(PER_HEAD, 0.5), trainable=True)
        randomized(model).save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path)
        assert len(law_names(again)) == (12 if part == "all" else 4)
        with torch.no_grad():
            got, expected = (m(**inputs).logits for m in (again, model))
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("part", ["language_model", "vision_tower"])
    def test_a_part_of_a_multimodal_model(self, tmp_path, part):
        torch.manual_seed(0)
        vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        vision |= {
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 4,
            "initializer_factor": 20.0,
        }
        config = transformers.LlavaConfig(
            text_config={"model_type": "llama", **SIZES}, image_token_index=63, image_seq_length=4,
            vision_config={"model_type": "clip_vision_model", **vision}, vision_feature_layer=-1,
        )  # fmt: skip
        model = transformers.LlavaForConditionalGeneration(config).eval()
        inputs = {
            "input_ids": torch.tensor([[1, 63, 63, 63, 63, 5, 6, 7]]),
            "pixel_values": torch.randn(1, 3, 8, 8),
        }
        with torch.no_grad():
            standard = model(**inputs).logits
            with huggingface.use(getattr(model.model, part), laws.LogLength(3)):
                expected = model(**inputs).logits
                model.save_pretrained(tmp_path)
                again = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path)
            assert torch.equal(again(**inputs).logits, expected)
        assert (expected - standard).abs().max() > 0.01
        both = [
            huggingface.laws_of(getattr(again.model, x)) for x in ("language_model", "vision_tower")
        ]
        assert sum(law is not None for x in both for law, _ in x.values()) == 2
        # What the configuration asks for goes with the laws.
        model.save_pretrained(tmp_path)
        assert "isentropic" not in (tmp_path / "config.json").read_text()

    def test_the_text_model_of_a_multimodal_one(self, tmp_path):
        vision = {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        text = {**SIZES, "query_pre_attn_scalar": 8}
        config = transformers.Gemma3Config(text_config=text, vision_config=vision)
        model = transformers.Gemma3ForConditionalGeneration(config).eval()
        huggingface.use(model.model.language_model, laws.AffineLog(PER_HEAD))
        model.save_pretrained(tmp_path)
        alone = transformers.Gemma3ForCausalLM.from_pretrained(
            tmp_path, key_mapping={"^model.language_model": "model"}
        )
        assert [law for law, _ in huggingface.laws_of(alone).values()] == [
            laws.AffineLog(np.float32(PER_HEAD))
        ] * 2

    def test_use_restores_the_configuration(self):
        model = decoder("Llama")
        before = model.config.to_dict()
        with huggingface.use(model, laws.LogLength(4)):
            outer = model.config.to_dict()
            with huggingface.use(model, laws.AffineLog(0.0, 1.0), trainable=True):
                assert model.config.isentropic_laws["layers"]["layers.0.self_attn"]["trainable"]
                assert law_names(model)
            assert model.config.to_dict() == outer
            assert not law_names(model)
        assert model.config.to_dict() == before
        huggingface.use(model, None)
        assert model.config.to_dict() == before

    def test_models_without_laws_are_as_before(self, tmp_path):
        model = decoder("Llama")
        model.save_pretrained(tmp_path)
        assert "isentropic" not in (tmp_path / "config.json").read_text()
        again, report = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, output_loading_info=True
        )
        assert not any(report.values())
        assert again.config._attn_implementation == "sdpa"
        assert not any(hasattr(module, "isentropic_law") for module in again.modules())

    def test_extending_twice_is_extending_once(self):
        methods = [getattr(transformers.PreTrainedModel, name) for name in _saving._EXTENSIONS]
        lookup = transformers.AttentionInterface.get_interface
        _saving.extend_transformers()
        _interface.extend_interface()
        assert methods == [getattr(transformers.PreTrainedModel, name) for name in _saving._EXTENSIONS]
        assert not any(hasattr(method.__wrapped__, "keeps_laws") for method in methods)
        assert transformers.AttentionInterface.get_interface is lookup

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"version": 2}, ValueError, r"`config.isentropic_laws` must have the version 1; .* got 2"),
            ({"layers": []}, TypeError, r"`config.isentropic_laws` must be a dictionary whose 'layers' are .* got \[\]"),
            ({"layers": {"layers.0.self_attn": "su"}}, TypeError, r"`config.isentropic_laws` must be a dictionary whose"),
            ({"base": 3}, TypeError, r"`config.isentropic_laws` must have the name of an attention .*, got int"),
            ({"layers": {"layers.0.self_attn": {"law": {"law": "LogLength"}, "count": "keys"} | {"trainable": "no"}}}, TypeError, "`trainable` must be True or False, got str"),
            ({"layers": {"layers.0.self_attn": {"law": {"law": "LogLength"}, "count": "keys"} | {"a": 1}}}, ValueError, "must have law, count, trainable of 'layers.0.self_attn', got law, count, a"),
            (
                {"layers": {"layers.0.self_attn": {"law": {"law": "LogLength"}, "count": "tokens"}}},
                ValueError, r"`count` must be 'keys' or 'positions', got 'tokens'",
            ),
            (
                {"layers": {"layers.0.self_attn": {"law": {"law": "os.system"}}}},
                ValueError, r"`law` must be 'AffineLog' or .* got 'os.system'",
            ),
            (
                {"layers": {"layers.0.self_attn": {"count": "keys", "law": {"law": "Constant", "value": [1.0, 2.0]}}}},
                ValueError, r"`layers.0.self_attn` must have numbers as parameters, .* \(4,\), got \(2,\)",
            ),
        ],
    )  # fmt: skip
    def test_other_entries(self, changes, error, message):
        own = {"version": 1, "base": "isentropic", "layers": {}} | changes
        with pytest.raises(error, match=message):
            decoder("Llama", isentropic_laws=own)

    @pytest.mark.parametrize("trainable", [False, "head"])
    def test_the_configuration_alone(self, tmp_path, trainable):
        """Laws without weights: for the same model from elsewhere."""
        model = decoder("Llama")
        model.save_pretrained(tmp_path / "model")
        huggingface.use(model, FROZEN["per layer"], trainable=trainable)
        expected = outputs(model, batch())
        model.config.save_pretrained(tmp_path / "laws")
        config = transformers.AutoConfig.from_pretrained(tmp_path / "laws")
        load = transformers.AutoModelForCausalLM.from_pretrained
        assert torch.equal(outputs(load(tmp_path / "model", config=config), batch()), expected)

    def test_a_dictionary(self):
        """Of a model that has no configuration of transformers, or for a file of your own."""
        model = decoder("Llama")
        huggingface.use(model, FROZEN["per layer"])
        saved = {name: law.to_dict() for name, (law, _) in huggingface.laws_of(model).items()}
        other = decoder("Llama")
        again = {name: laws.from_dict(x) for name, x in json.loads(json.dumps(saved)).items()}
        huggingface.use(other, again)
        assert huggingface.laws_of(other) == huggingface.laws_of(model)


class TestSaidOnce:
    def test_no_laws(self):
        _interface._warn_of_no_laws.cache_clear()
        model = decoder("Llama", attn_implementation="isentropic")
        with pytest.warns(UserWarning, match="LlamaAttention computes standard attention") as record:
            outputs(model, batch())
        assert len(record) == 1
        outputs(model, batch())  # warnings are errors
        _interface._warn_of_no_laws.cache_clear()
        huggingface.use(model, {0: laws.LogLength()})
        outputs(model, batch())

    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    def test_other_implementations_keep_laws(self, tmp_path, implementation):
        model = decoder("Llama")
        standard = outputs(model, batch("right"))
        huggingface.use(model, laws.LogLength(4))
        expected = outputs(model, batch("right"))
        assert (expected - standard).abs().max() > 0.1
        model.save_pretrained(tmp_path)
        model.set_attn_implementation(implementation)
        loaded = transformers.LlamaForCausalLM.from_pretrained(
            tmp_path, attn_implementation=implementation
        )
        for other in (model, loaded.eval()):
            assert other.config._attn_implementation == implementation
            close(outputs(other, batch("right")), expected)
        huggingface.use(model, None, base=implementation)
        close(outputs(model, batch("right")), standard)

    def test_laws_of_your_own(self, tmp_path):
        model = decoder("Llama")
        huggingface.use(model, [Saturating(4.0), laws.LogLength(4)])
        with pytest.warns(
            UserWarning, match=r"law of layers.0.self_attn cannot be saved: .* got Saturating"
        ):
            model.save_pretrained(tmp_path)
        with pytest.warns(UserWarning, match=r"law Saturating of layers.0.self_attn was not saved"):
            again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        (first, _), (second, _) = huggingface.laws_of(again).values()
        assert first is None
        assert second == laws.LogLength(4)


@dataclass(frozen=True)
class Saturating(laws.Law):
    half: float

    def evaluate(self, xp, n):
        return 2 * n / (n + self.half)


class TestTrainable:
    @pytest.mark.parametrize(
        ("law", "trainable", "shapes"),
        [
            (laws.AffineLog(0.0, 1.0), True, {"slope": (1,), "intercept": (1,)}),
            (laws.AffineLog(0, 1, minimum=0.5), "head", {"slope": (4,), "intercept": (4,)}),
            (laws.AffineLog(PER_HEAD, 1.0), True, {"slope": (4,), "intercept": (1,)}),
            (laws.scaled(laws.LogLength(np.full(4, 8.0)), 1.0), "head", {"factor": (4,)}),
            (laws.shifted(laws.Power(0.1, 4), 1), True, {"law.exponent": (1,)}),
            (StepLog(0.1, 4), True, {"coefficient": (1,)}),
            (laws.PowerLog(1.0, 0.5, 2.0), True, {"offset": (1,), "coefficient": (1,), "exponent": (1,)}),
            (laws.Knots([2, 8], [1.0, 1.5]), True, {"factors": (1, 2)}),
            (laws.Knots([2, 8], [1.0, 1.5]), "head", {"factors": (4, 2)}),
            (Saturating(4.0), True, {"half": (1,)}),
        ],
    )  # fmt: skip
    def test_parameters(self, law, trainable, shapes):
        model = decoder("Llama", num_hidden_layers=1)
        with huggingface.use(model, law):
            expected = outputs(model, batch())
        huggingface.use(model, law, trainable=trainable)
        own = {n: p for n, p in model.named_parameters() if "isentropic_law" in n}
        assert {n: tuple(p.shape) for n, p in own.items()} == {
            f"{FIRST}.isentropic_law.{name}": shape for name, shape in shapes.items()
        }
        assert own.keys() <= model.state_dict().keys()
        torch.testing.assert_close(outputs(model, batch()), expected, rtol=0, atol=1e-5)
        model(**batch()).logits.square().mean().backward()
        assert all(p.grad.abs().min() > 0 for p in own.values())

    def test_each_layer_has_its_own(self):
        model, slope = decoder("Llama"), torch.nn.Parameter(torch.ones(4))
        huggingface.use(model, laws.AffineLog(slope), trainable=True)
        own = [p for n, p in model.named_parameters() if n.endswith("slope")]
        assert len({id(p) for p in (slope, *own)}) == 3

    def test_borrowed_parameters_are_those_of_the_caller(self, tmp_path):
        model, slope = decoder("Llama"), torch.nn.Parameter(torch.ones(4))
        huggingface.use(model, laws.AffineLog(slope))
        assert not law_names(model)
        with torch.no_grad():
            slope += 1
        model.save_pretrained(tmp_path)
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(outputs(again, batch()), outputs(model, batch()))

    @pytest.mark.parametrize("law", [laws.LogLength(), laws.shifted(InfoScale(512, 8), 1)])
    def test_nothing_to_train(self, law):
        must = r"`laws\[0\]` must have a parameter that can be trained \(`laws.scaled"
        with pytest.raises(ValueError, match=must):
            huggingface.use(decoder("Llama"), law, trainable=True)

    def test_arguments(self):
        with pytest.raises(
            ValueError, match=r"`trainable` must be True or False or 'head', got 'layer'"
        ):
            huggingface.use(decoder("Llama"), None, trainable="layer")

    def test_factor_1_changes_nothing(self):
        model = decoder("Llama")
        with huggingface.use(model, None):
            expected = outputs(model, batch())
        huggingface.use(model, laws.AffineLog(0.0, 1.0), trainable="head")
        torch.testing.assert_close(outputs(model, batch()), expected, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_casts(self, tmp_path, dtype):
        model = decoder("Llama")
        huggingface.use(model, laws.AffineLog(PER_HEAD, minimum=np.full(4, 1 / 3)), trainable=True)
        model.to(dtype)
        for law, _ in huggingface.laws_of(model).values():
            assert law.slope.dtype == dtype  # as every parameter
            assert law.minimum.dtype == torch.promote_types(dtype, torch.float32)
            assert (law.minimum - 1 / 3).abs().max() < 1e-7
        if dtype != torch.float64:
            model.save_pretrained(tmp_path)
            again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
            assert again.dtype == dtype
            assert huggingface.laws_of(again) == huggingface.laws_of(model)

    def test_loading_in_half_precision_does_not_round_laws(self, tmp_path):
        model = decoder("Llama")
        huggingface.use(model, laws.AffineLog(PER_HEAD), trainable=True)
        randomized(model).save_pretrained(tmp_path)
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert again.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
        assert huggingface.laws_of(again) == huggingface.laws_of(model)

    def test_missing_weights(self, tmp_path):
        """The initial values are in the configuration."""
        model = decoder("Llama")
        model.save_pretrained(tmp_path)
        huggingface.use(model, laws.AffineLog(0.25, 1.0, minimum=PER_HEAD), trainable="head")
        model.config.save_pretrained(tmp_path)
        expected = outputs(model, batch())
        again, report = transformers.LlamaForCausalLM.from_pretrained(
            tmp_path, output_loading_info=True
        )
        assert sorted(report["missing_keys"]) == sorted(law_names(model))
        assert torch.equal(outputs(again, batch()), expected)

    @pytest.mark.parametrize(
        "law", [laws.AffineLog(0.25, 1.0, minimum=PER_HEAD), laws.scaled(laws.Power(0.25, 4), PER_HEAD)]
    )
    def test_the_configuration_has_the_trained_numbers(self, tmp_path, law):
        model = decoder("Llama")
        huggingface.use(model, law, trainable=True)
        randomized(model).save_pretrained(tmp_path)
        config = transformers.LlamaConfig.from_pretrained(tmp_path)
        fresh = transformers.AutoModelForCausalLM.from_config(config)
        assert huggingface.laws_of(fresh) == huggingface.laws_of(model)
        assert entry(tmp_path)["layers"]["layers.0.self_attn"]["law"] != law.to_dict()

    def test_the_configuration_has_the_numbers_of_the_state_dict(self, tmp_path):
        model = decoder("Llama")
        huggingface.use(model, laws.AffineLog(0.25), trainable=True)
        state = {
            name: x + 1 if "isentropic_law" in name else x for name, x in model.state_dict().items()
        }
        model.save_pretrained(tmp_path, state_dict=state)
        saved = entry(tmp_path)["layers"]["layers.1.self_attn"]["law"]
        assert laws.from_dict(saved) == laws.AffineLog(np.asarray([1.25]), np.asarray([1.0]))

    def test_a_diverged_model_is_saved(self, tmp_path):
        model = decoder("Llama")
        huggingface.use(model, laws.AffineLog(0.25, 1.0), trainable=True)
        before = model.config.to_dict()["isentropic_laws"]
        with torch.no_grad():
            model.get_parameter(f"{SECOND}.isentropic_law.slope").fill_(math.nan)
        model.save_pretrained(tmp_path)
        assert entry(tmp_path) == before

    def test_out_of_range(self):
        model = decoder("Llama")
        huggingface.use(model, laws.AffineLog(0.0, 1.0), trainable=True)
        with torch.no_grad():
            model.get_parameter(f"{SECOND}.isentropic_law.slope").fill_(math.nan)
        with pytest.raises(ValueError, match=r"`slope` must be finite, got nan at \(0,\)"):
            outputs(model, batch())

    def test_compiled(self):
        module = torch.nn.Module()
        module.isentropic_law = LayerLaw(laws.AffineLog(PER_HEAD), "keys", True, torch.empty(0))
        attend = transformers.AttentionInterface()["isentropic"]

        def run(x):
            return attend(module, x, x, x, None)[0]

        compiled = torch.compile(run, fullgraph=True, backend="eager")
        for length in (6, 7):
            x, gradients = torch.randn(1, 4, length, 8), []
            for function in (run, compiled):
                module.zero_grad()
                function(x).square().mean().backward()
                gradients.append(module.isentropic_law.slope.grad)
            assert gradients[0].abs().min() > 0
            torch.testing.assert_close(gradients[1], gradients[0])

    def test_a_model_that_passes_positional_arguments(self, tmp_path, monkeypatch):
        """To the check of its implementation, as HRM-Text does."""
        checks = transformers.LlamaForCausalLM._check_and_adjust_attn_implementation

        def positional(self, name, is_init_check=False, allow_all_kernels=False):
            return checks(self, name, is_init_check, allow_all_kernels)

        monkeypatch.setattr(
            transformers.LlamaForCausalLM, "_check_and_adjust_attn_implementation", positional
        )
        model = decoder("Llama")
        huggingface.use(model, laws.LogLength(4), base="sdpa")
        model.save_pretrained(tmp_path)
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        assert again.config._attn_implementation == "sdpa"

    def test_laws_of_another_model(self):
        """With what their n counts."""
        model, other = decoder("Llama"), decoder("Llama")
        huggingface.use(model, {1: laws.LogLength(4)}, count="positions")
        huggingface.use(other, huggingface.laws_of(model))
        assert huggingface.laws_of(other) == huggingface.laws_of(model)
        assert torch.equal(outputs(other, batch("left")), outputs(model, batch("left")))

    def test_fields_that_are_not_trained(self):
        """Booleans, and values that a law has computed once."""

        @dataclass(frozen=True, eq=False, repr=False)
        class Rooted(laws.Law):
            slope: float = 1.0
            is_rooted: bool = True

            @functools.cached_property
            def twice(self):
                return 2 * self.slope

            def evaluate(self, xp, n):
                return self.slope * (n**0.5 if self.is_rooted else n)

        law, model = Rooted(), decoder("Llama")
        assert law.twice == 2
        huggingface.use(model, law, trainable=True)
        assert {name.rpartition(".")[2] for name in law_names(model)} == {"slope"}
        assert torch.isfinite(outputs(model, batch())).all()

    def test_initializing_again_resets_nothing(self):
        model = decoder("Llama")
        huggingface.use(model, laws.AffineLog(0.0, 1.0, minimum=PER_HEAD), trainable="head")
        before = huggingface.laws_of(copy.deepcopy(randomized(model)))
        model.initialize_weights()
        assert huggingface.laws_of(model) == before


class TestWithoutMemory:
    """Models that are made without the memory of their tensors, and filled from a checkpoint."""

    LAWS = (laws.AffineLog(PER_HEAD, minimum=PER_HEAD), laws.scaled(laws.Power(0.2, 4), PER_HEAD))

    @pytest.mark.parametrize("law", LAWS, ids=["AffineLog", "scaled"])
    @pytest.mark.parametrize("trainable", [False, "head"])
    def test_tensors(self, tmp_path, law, trainable):
        model = decoder("Llama")
        huggingface.use(model, law, trainable=trainable)
        want = huggingface.laws_of(randomized(model))
        model.save_pretrained(tmp_path)

        def made():
            return transformers.LlamaForCausalLM(copy.deepcopy(model.config))

        def on_meta():
            with torch.device("meta"):
                return made()

        def used_on_meta():
            other = decoder("Llama").to("meta")
            huggingface.use(other, law, trainable=trainable)
            return other

        for other in (made(), on_meta(), used_on_meta(), copy.deepcopy(model).to("meta")):
            other.to_empty(device="cpu")
            other.load_state_dict(model.state_dict())
            assert huggingface.laws_of(other) == want
        other = on_meta()
        other.load_state_dict(model.state_dict(), assign=True)
        assert huggingface.laws_of(other) == want
        with accelerate.init_empty_weights():
            other = made()
        other = accelerate.load_checkpoint_and_dispatch(other, tmp_path, device_map={"": "cpu"})
        assert torch.equal(outputs(other, batch()), outputs(model, batch()))

    @pytest.mark.parametrize("device", ["cpu", None])
    @pytest.mark.parametrize("law_is_saved", [True, False])
    def test_a_model_of_your_own(self, tmp_path, device, law_is_saved):
        trained = OwnModel(OwnConfig(law_device=device))
        with torch.no_grad():
            trained.attention.law.intercept += 1
        trained.save_pretrained(tmp_path)
        if not law_is_saved:
            weights = {name: x for name, x in trained.state_dict().items() if "law" not in name}
            trained.save_pretrained(tmp_path, state_dict=weights)
        if device is None:
            must = (
                r"`attention.law.[a-z]*` must have values .* \(make it with `device='cpu'`\), got none"
            )
            with pytest.raises(ValueError, match=must):
                OwnModel.from_pretrained(tmp_path)
            return
        again = OwnModel.from_pretrained(tmp_path)
        law = laws.AffineLog(torch.full((4,), 0.25), torch.full((4,), 2.0 if law_is_saved else 1.0))
        assert again.attention.law() == law
        assert again.other() == laws.scaled(laws.LogLength(4), torch.full((4,), 0.5))
        x = torch.ones(1, 5, 16)
        assert torch.isfinite(again(x)).all()


class OwnConfig(transformers.PretrainedConfig):
    model_type = "isentropic-test"

    def __init__(self, law_device=None, **options):
        super().__init__(**options)
        self.law_device = law_device


class OwnModel(transformers.PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        slope, intercept, factor = (
            torch.full((4,), x, device=config.law_device) for x in (0.25, 1.0, 0.5)
        )
        law = laws.AffineLog(slope, torch.nn.Parameter(intercept))
        self.attention = MultiheadAttention(16, 4, batch_first=True, law=law)
        self.other = LawModule(laws.scaled(laws.LogLength(4), factor))
        self.post_init()

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Data(torch.utils.data.Dataset):
    ids = torch.randint(3, 64, (16, 12), generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def with_scales(**changes):
    """SSMax: a learned slope for each head."""
    model = decoder("Llama", **changes)
    huggingface.use(model, laws.AffineLog(0.3), trainable="head")
    return model


def train(model, folder, steps, resume=None, **options):
    options = transformers.TrainingArguments(
        str(folder), max_steps=steps, save_steps=2, logging_steps=1, learning_rate=0.01, report_to="none",
        per_device_train_batch_size=4, use_cpu=True, disable_tqdm=True, seed=3, lr_scheduler_type="constant",
        **options,
    )  # fmt: skip
    trainer = transformers.Trainer(model, options, train_dataset=Data())
    trainer.train(resume_from_checkpoint=resume)
    return [x["loss"] for x in trainer.state.log_history if "loss" in x]


class TestTraining:
    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_trainer(self, tmp_path, checkpointing):
        options = {"gradient_checkpointing": checkpointing}
        model = with_scales()
        losses = train(model, tmp_path / "whole", 4, **options)
        slopes = [law.slope for law, _ in huggingface.laws_of(model).values()]
        assert all((x - 0.3).abs().min() > 1e-4 for x in slopes)
        assert losses[-1] < losses[0]

        train(with_scales(), tmp_path / "part", 2, **options)
        checkpoint = tmp_path / "part" / "checkpoint-2"
        resumed = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
        assert law_names(resumed) == law_names(model)
        assert train(resumed, tmp_path / "part", 4, resume=str(checkpoint), **options) == losses
        final = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "part" / "checkpoint-4")
        assert torch.equal(outputs(final, batch()), outputs(model.eval(), batch()))

    def test_resuming_without_the_laws(self, tmp_path, caplog):
        """The trainer says which tensors of the checkpoint the model does not have, and does not go on."""
        train(with_scales(), tmp_path, 2)
        transformers.logging.enable_propagation()
        caplog.set_level("WARNING", logger="transformers")  # which other tests may have changed
        with pytest.raises(ValueError, match="a parameter group that doesn't match"):
            train(decoder("Llama"), tmp_path, 4, resume=str(tmp_path / "checkpoint-2"))
        transformers.logging.disable_propagation()
        assert "unexpected keys in the checkpoint model loaded" in caplog.text
        assert all(name in caplog.text for name in law_names(with_scales()))

    def test_checkpointing_gives_the_same_gradients(self):
        gradients = []
        for checkpointing in (False, True):
            model = with_scales().train()
            if checkpointing:
                model.gradient_checkpointing_enable()
            model(**batch(), labels=batch()["input_ids"]).loss.backward()
            gradients.append({name: p.grad for name, p in model.named_parameters()})
        assert any("isentropic_law" in name for name in gradients[0])
        for name, expected in gradients[0].items():
            assert torch.equal(gradients[1][name], expected)

    def test_accelerate(self, tmp_path):
        def start():
            accelerator = accelerate.Accelerator(cpu=True)
            model = with_scales()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            return accelerator, *accelerator.prepare(model, optimizer)

        def step(accelerator, model, optimizer):
            loss = model(**batch(), labels=batch()["input_ids"]).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        first = start()
        step(*first)
        first[0].save_state(tmp_path)
        expected = [step(*first) for _ in range(2)]
        second = start()
        second[0].load_state(tmp_path)
        assert [step(*second) for _ in range(2)] == expected
        first[0].unwrap_model(first[1]).save_pretrained(tmp_path / "model")
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
        assert torch.equal(outputs(again, batch()), outputs(first[1].eval(), batch()))


def test_fully_sharded(tmp_path):
    """FSDP replaces the parameters by shards, and frees their memory between calls."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    def stepped(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(**batch(), labels=batch()["input_ids"]).loss.backward()
        optimizer.step()
        return model

    expected = stepped(with_scales()).state_dict()
    file = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=file, rank=0, world_size=1)
    try:
        model = with_scales()
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)
        options = StateDictOptions(full_state_dict=True)
        got = get_model_state_dict(stepped(model), options=options)
        assert list(got) == list(expected)
        for name in law_names(model):
            torch.testing.assert_close(got[name], expected[name])
        model.save_pretrained(tmp_path / "model", state_dict=got)
    finally:
        torch.distributed.destroy_process_group()
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(again[name], got[name]) for name in got)


class TestAdapters:
    def adapted(self, base, **options):
        config = peft.LoraConfig(
            target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False, **options
        )
        torch.manual_seed(2)
        return peft.get_peft_model(base, config).eval()

    @pytest.mark.parametrize("trainable", [False, "head"])
    def test_on_a_model_with_laws(self, tmp_path, trainable):
        base = decoder("Llama")
        huggingface.use(base, laws.AffineLog(PER_HEAD), trainable=trainable)
        standard = outputs(randomized(base), batch())
        base.save_pretrained(tmp_path / "base")
        model = self.adapted(base)
        expected = outputs(model, batch())
        assert (expected - standard).abs().max() > 0.1
        model.save_pretrained(tmp_path / "adapter")
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
        again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
        assert torch.equal(outputs(again, batch()), expected)
        merged = again.merge_and_unload()
        torch.testing.assert_close(outputs(merged, batch()), expected, rtol=0, atol=1e-4)
        merged.save_pretrained(tmp_path / "merged")
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(outputs(merged, batch()), expected, rtol=0, atol=1e-4)

    def test_laws_put_on_afterwards(self):
        model = self.adapted(decoder("Llama"))
        huggingface.use(model, laws.LogLength(4))
        layers = model.base_model.model.config.isentropic_laws["layers"]
        assert list(layers) == ["layers.0.self_attn", "layers.1.self_attn"]

    def test_laws_of_the_adapter(self, tmp_path):
        """PEFT trains and saves whole modules beside the low ranks."""
        base = decoder("Llama")
        huggingface.use(base, laws.AffineLog(0.0, 1.0), trainable="head")
        base.save_pretrained(tmp_path / "base")
        model = self.adapted(base, modules_to_save=["isentropic_law"]).train()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        model(**batch(), labels=batch()["input_ids"]).loss.backward()
        optimizer.step()
        law, _ = next(iter(huggingface.laws_of(model).values()))
        assert law.slope.abs().min() > 0
        expected = outputs(model.eval(), batch())
        model.save_pretrained(tmp_path / "adapter")
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
        again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
        assert torch.equal(outputs(again, batch()), expected)
        again.merge_and_unload().save_pretrained(tmp_path / "merged")
        merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(outputs(merged, batch()), expected, rtol=0, atol=1e-4)
