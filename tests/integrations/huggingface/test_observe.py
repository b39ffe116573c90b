"""Statistics of attention during training are those of the weights, and do not change the step."""

import copy
import gc
import math
import struct
import warnings
import weakref

import numpy as np
import pytest

from isentropic import laws

pytest.importorskip("minilm", reason="safetensors or tokenizers is not installed")
pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import torch  # noqa: E402
from tiny_models import CASES, batch, decoder, encoder_decoder, special  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask  # noqa: E402

from isentropic.integrations import _observe as _shared  # noqa: E402
from isentropic.integrations import huggingface  # noqa: E402
from isentropic.integrations._observe import listeners  # noqa: E402
from isentropic.integrations.huggingface import _calls  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
QUANTITIES = ("entropy", "normalized_entropy", "log_normalizer", "sink_mass", "largest_logit")


@pytest.fixture(autouse=True)
def _only_once(request):
    if request.config.getoption("--backend") not in (None, "torch"):
        pytest.skip("belongs to the backend torch")
    yield
    assert listeners == []


def step(model, inputs):
    """The loss and the gradients of a training step."""
    model.zero_grad()
    out = model(**inputs, labels=inputs["input_ids"])
    out.loss.backward()
    return [out.loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


class Reference:
    """Attention of a test implementation that forms the logits, and what `observe` should measure."""

    def __init__(self, monkeypatch, factor=None):
        self.factor, self.rows = factor, []
        for interface, x in (
            (transformers.AttentionInterface, self.attend),
            (transformers.AttentionMaskInterface, transformers.masking_utils.eager_mask),
        ):
            monkeypatch.setitem(interface._global_mapping, "reference", x)

    @torch.no_grad()
    def attend(self, module, query, key, value, attention_mask, scaling, softcap=None, s_aux=None, **_):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        visible = attention_mask == 0
        logits = (query @ key.mT * scaling).double()
        if self.factor is not None:
            logits = logits * self.factor(visible.sum(-1))[..., None]
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~visible, -math.inf)
        largest, total = logits, logits
        if s_aux is not None:
            total = torch.cat([logits, s_aux.double()[:, None, None].expand(*logits.shape[:-1], 1)], -1)
        p = torch.softmax(total, -1)
        self.rows.append(self.statistics(largest, total, p, visible, s_aux is not None))
        return (p[..., : value.shape[2]].to(value.dtype) @ value).transpose(1, 2), None

    @staticmethod
    def statistics(logits, total, p, visible, has_sink):
        tokens = visible[:, 0].diagonal(dim1=1, dim2=2)
        entropy = torch.special.entr(p).sum(-1)
        n = visible.sum(-1) + has_sink
        first = tokens.int().argmax(1)
        sink = torch.stack([x[:, :, j] for x, j in zip(p, first, strict=True)])
        if has_sink:
            sink = sink + p[..., -1]
        by_query = {
            "entropy": entropy, "normalized_entropy": entropy / torch.log(n), "sink_mass": sink,
            "log_normalizer": torch.logsumexp(total, -1), "largest_logit": logits.amax(-1),
        }  # fmt: skip
        many = tokens[:, None] & (n > 1)
        row = {}
        for name, x in by_query.items():
            used = (many if name == "normalized_entropy" else tokens[:, None]).expand(x.shape)
            heads = [x[:, h][used[:, h]] for h in range(x.shape[1])]
            row[name] = np.array([
                float(h.max() if name == "largest_logit" else h.mean()) for h in heads
            ])  # fmt: skip
        return row

    def check(self, observation, **tolerance):
        assert observation.entropy.shape == (len(self.rows), len(self.rows[0]["entropy"]))
        for name in QUANTITIES:
            expected = np.stack([row[name] for row in self.rows])
            np.testing.assert_allclose(getattr(observation, name), expected, **tolerance)


def log(n):
    return torch.log(n.clamp(min=1).double())


class TestValues:
    """Against weights that are formed, for every family and implementation."""

    @pytest.mark.parametrize(
        ("name", "kind", "side"),
        [("Llama", "sdpa", None), ("Llama", "sdpa", "right"), *((*case, "left") for case in CASES)],
    )
    def test_decoders(self, monkeypatch, name, kind, side):
        reference = Reference(monkeypatch)
        model = decoder(name, attn_implementation="reference").train()
        model(**batch(side))
        model.set_attn_implementation(kind)
        with huggingface.observe(model) as observer:
            model(**batch(side))
        assert model.config._attn_implementation == kind
        reference.check(observer.latest, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(
        ("name", "base"),
        [(x, "isentropic") for x in ("Qwen3", "Gemma2", "GptOss")]
        + [("Qwen3", "sdpa"), ("Qwen3", "eager")],
    )
    def test_laws(self, monkeypatch, name, base):
        slope = torch.tensor([0.2, 0.5, 0.8, 1.1])
        reference = Reference(monkeypatch, lambda n: slope[:, None] * log(n))
        model = decoder(name, attn_implementation="reference").train()
        model(**batch("left"))
        with (
            huggingface.use(model, laws.AffineLog(slope, 0.0), base=base),
            huggingface.observe(model) as observer,
        ):
            model(**batch("left"))
        reference.check(observer.latest, rtol=1e-4, atol=1e-5)

    def test_packed_sequences_have_several_first_keys(self):
        model = decoder("Llama").train()
        tokens, n = batch()["input_ids"][:1], 5
        positions = torch.cat([torch.arange(n), torch.arange(12 - n)])[None]
        with huggingface.observe(model, every=1) as observer:
            parts = []
            for part in (tokens[:, :n], tokens[:, n:]):
                model(part)
                parts.append(observer.latest)
            model(tokens, position_ids=positions, use_cache=False)
        weights = (n, 12 - n)
        for name in ("entropy", "sink_mass", "log_normalizer"):
            expected = np.average([getattr(x, name) for x in parts], axis=0, weights=weights)
            np.testing.assert_allclose(getattr(observer.latest, name), expected, rtol=1e-4)

    def test_encoders_and_cross_attention(self):
        size = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 64}
        encoder = transformers.BertModel(transformers.BertConfig(**size, num_hidden_layers=2)).train()
        inputs = batch("right")
        with huggingface.observe(encoder, 1) as observer:
            encoder(**inputs)
            padded = observer.latest
            encoder(inputs["input_ids"][1:, :8])
            short = observer.latest
            encoder(inputs["input_ids"][:1])
        expected = (12 * observer.latest.entropy[0] + 8 * short.entropy[0]) / 20
        # The second layer has inputs that depend on dropout.
        np.testing.assert_allclose(padded.entropy[0], expected, rtol=0.05)

        model = encoder_decoder("T5").train()
        with huggingface.observe(model, 1) as observer:
            model(input_ids=batch()["input_ids"], labels=batch(length=7)["input_ids"])
        assert observer.latest.entropy.shape == (6, 4)  # self-attention of both, and cross-attention
        assert np.isfinite(observer.latest.entropy).all()

    def test_the_first_sequences(self):
        model = decoder("Qwen3").train()
        inputs = batch("left")
        with huggingface.observe(model, 1, sequences=1) as observer:
            model(**inputs)
            cut = observer.latest
            model(**{name: x[:1] for name, x in inputs.items()})
        for name in QUANTITIES:
            np.testing.assert_allclose(
                getattr(cut, name), getattr(observer.latest, name), rtol=1e-4, atol=1e-6
            )

    def test_half_precision(self):
        model = decoder("Llama").train()
        with huggingface.observe(model, 1) as observer:
            model(**batch())
            exact = observer.latest
            with torch.autocast("cpu", torch.bfloat16):
                model(**batch())
        assert observer.latest.entropy.dtype == np.float64
        np.testing.assert_allclose(observer.latest.entropy, exact.entropy, atol=0.05)


class TestMasks:
    """Masks of implementations that do not run here: one query at a time, as in the mask of "eager"."""

    def call(self, implementation, mask, **kwargs):
        x = torch.zeros(kwargs.pop("batch", 2), 4, 6, 8)
        module = torch.nn.Module()
        module.is_causal = True
        return _calls.with_tokens(_calls.call_of(implementation, module, x, x, mask, **kwargs))

    @pytest.mark.parametrize("window", [None, 3])
    def test_flash_attention(self, window):
        tokens = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
        call = self.call("flash_attention_2", tokens, sliding_window=window)
        n = call.options["mask"].visible_count(6, 6)
        full = torch.tensor([[1, 2, 3, 4, 5, 6], [0, 0, 1, 2, 3, 4]])
        expected = full if window is None else full.clamp(max=window)
        assert torch.equal(torch.as_tensor(n)[:, 0], expected)
        assert torch.equal(call.counted[:, 0], tokens.bool())
        assert call.is_first.int().argmax(1).tolist() == [0, 2]

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_packed_flash_attention(self, is_causal):
        expected = [1, 2, 3, 4, 1, 2] if is_causal else [4, 4, 4, 4, 2, 2]
        ends = torch.tensor([0, 4, 6], dtype=torch.int32)
        packed = {f"cu_seq_lens_{x}": ends for x in "qk"} | {f"max_length_{x}": 4 for x in "qk"}
        for options in ({"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1]])}, packed):
            call = self.call("flash_attention_2", None, batch=1, is_causal=is_causal, **options)
            n = call.options["mask"].visible_count(6, 6)
            assert torch.as_tensor(n).flatten().tolist() == expected
            assert call.is_first.flatten().nonzero().flatten().tolist() == [0, 4]

    def test_flex_attention(self):
        def causal(b, h, q, k):
            return (q >= k) & (k >= 2 * b)

        mask = create_block_mask(causal, 2, None, 6, 6, device="cpu")
        call = self.call("flex_attention", mask)
        assert call.options["mask"].sum(-1)[:, 0].tolist() == [[1, 2, 3, 4, 5, 6], [0, 0, 1, 2, 3, 4]]
        assert call.is_first.int().argmax(1).tolist() == [0, 2]

    def test_eager_without_a_mask_shows_all_keys(self):
        assert self.call("eager", None).options["mask"] is None
        assert self.call("sdpa", None).options["mask"] is not None

    def test_unsupported_arguments(self):
        with pytest.raises(ValueError, match="`indices` must be None"):
            self.call("sdpa", None, indices=torch.zeros(1))


class TestStep:
    """The step is the same with and without observing."""

    @pytest.mark.filterwarnings("ignore:.*because its model has no laws:UserWarning")
    @pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])
    @pytest.mark.parametrize("kind", ["eager", "sdpa", "isentropic"])
    def test_bits_of_loss_and_gradients(self, kind, checkpointing):
        model = decoder("Llama", attn_implementation=kind).train()
        dropout = 0.1 if kind != "isentropic" else 0.0
        model.config.attention_dropout = dropout
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = dropout
        if checkpointing is not None:
            options = {"use_reentrant": checkpointing == "reentrant"}
            model.gradient_checkpointing_enable(options)
        torch.manual_seed(0)
        expected = step(model, batch("left"))
        state = torch.get_rng_state()
        seen = []
        with huggingface.observe(model, every=1, then=seen.append):
            torch.manual_seed(0)
            got = step(model, batch("left"))
        assert torch.equal(torch.get_rng_state(), state)
        assert len(got) == len(expected) > 10
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert len(seen) == 1  # the recomputation is not another pass

    def test_checkpointing_does_not_count_twice(self):
        model = decoder("Llama").train()
        with huggingface.observe(model, 1) as observer:
            step(model, batch("left"))
            expected = observer.latest
            model.gradient_checkpointing_enable()
            step(model, batch("left"))
            assert observer.latest.step == 1
            for name in QUANTITIES:
                assert np.array_equal(getattr(observer.latest, name), getattr(expected, name))
            # The whole model may be checkpointed too.
            model.gradient_checkpointing_disable()
            whole = torch.utils.checkpoint.checkpoint(
                lambda x: model(inputs_embeds=x).logits,
                torch.zeros(1, 5, 32, requires_grad=True),
                use_reentrant=False,
            )
            whole.sum().backward()
            assert observer.latest.step == 2

    def test_nothing_is_kept(self):
        model = decoder("Llama").train()
        with huggingface.observe(model, 1) as observer:
            step(model, batch())
            tensors = sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
            for _ in range(3):
                step(model, batch())
            assert sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()) == tensors
            reference = weakref.ref(observer)
        del observer
        gc.collect()
        assert reference() is None

    def test_close(self):
        model = decoder("Llama").train()
        hooks = [len(model._forward_hooks), len(model._forward_pre_hooks)]
        observer = huggingface.observe(model, 1)
        model(**batch())
        latest = observer.latest
        observer.close()
        observer.close()
        model(**batch())
        assert observer.latest is latest
        assert [len(model._forward_hooks), len(model._forward_pre_hooks)] == hooks

    def test_copies_of_the_model_are_not_observed(self):
        model = decoder("Llama").train()
        with huggingface.observe(model, 1) as observer:
            copied = copy.deepcopy(model)
            copied(**batch())
            assert observer.latest is None
            model(**batch())
            assert observer.latest.step == 0

    def test_an_adapted_model(self):
        peft = pytest.importorskip("peft", reason="peft is not installed")
        model = decoder("Llama").train()
        with huggingface.observe(model, 1) as observer:
            model(**batch())
            expected = observer.latest
        config = peft.LoraConfig(target_modules=["q_proj"], r=2)
        adapted = peft.get_peft_model(model, config)  # adapters are 0 at first
        with huggingface.observe(adapted, 1) as observer:
            step(adapted, batch())
        np.testing.assert_allclose(observer.latest.entropy, expected.entropy, rtol=1e-5)

    def test_a_failed_pass(self):
        model = decoder("Llama").train()
        with huggingface.observe(model, 1) as observer:
            with pytest.raises(ValueError, match="You must specify exactly one"):
                model()
            assert observer.latest is None
            model(**batch())
            assert observer.latest.step == 1

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
    @pytest.mark.parametrize("is_inside", [False, pytest.param(True, marks=pytest.mark.nightly)])
    def test_torch_compile(self, is_inside):
        graphs = []

        def backend(graph, inputs):
            def run(*args):
                graphs.append(graph)
                return graph.forward(*args)

            return run

        torch.compiler.reset()
        model = decoder("Llama", num_hidden_layers=1).train()
        with huggingface.observe(model, 1) as observer:
            model(**batch())
            expected = observer.latest
        compiled = torch.compile(model, backend=backend, fullgraph=not is_inside)
        counts = []
        with huggingface.observe(model if is_inside else compiled, every=2) as observer:
            for _ in range(4):
                graphs.clear()
                compiled(**batch())
                counts.append(len(graphs))
            assert observer.latest.step == 2
            assert observer.latest.layers == expected.layers
            np.testing.assert_allclose(observer.latest.entropy, expected.entropy, rtol=1e-5)
        if is_inside:
            assert min(counts) > 1
        else:
            assert counts == [0, 1, 0, 1]
        torch.compiler.reset()

    def test_profile_beside_an_observer(self):
        model = decoder("Llama").train()
        with huggingface.observe(model, 1) as observer:
            model(**batch())
            latest = observer.latest
            report = huggingface.profile(model, [batch()])
            assert observer.latest is latest
            assert model.training
            model(**batch())
        assert report.entropy.shape[1:] == (2, 4)
        assert observer.latest.step == 1


class TestWhen:
    def test_every(self):
        model, seen = decoder("Llama").train(), []
        with huggingface.observe(model, every=3, then=seen.append):
            for i in range(7):
                model(**batch())
                model.eval()
                model(**batch())
                model.train()
                assert len(seen) == i // 3 + 1
        assert [x.step for x in seen] == [0, 3, 6]

    def test_request(self):
        model = decoder("Llama").train()
        with huggingface.observe(model, None) as observer:
            model(**batch())
            assert observer.latest is None
            observer.request()
            model(**batch())
            model(**batch())
            assert observer.latest.step == 1
            model.eval()
            observer.request()
            model(**batch())
            assert observer.latest.step == 3

    def test_steps_of_the_caller(self):
        model, seen = decoder("Llama").train(), []
        with huggingface.observe(model, None, then=seen.append) as observer:
            for i in range(4):  # optimizer steps of two passes each
                if i % 3 == 0:
                    observer.request(i)
                model(**batch())
                model(**batch())
            observer.request()
            model(**batch())
            assert [x.step for x in seen] == [0, 3, 8]
            with pytest.raises(TypeError, match="`step` must be an integer, got float"):
                observer.request(1.5)
            with pytest.raises(ValueError, match="`step` must be at least 0, got -1"):
                observer.request(-1)

    def test_models_are_independent(self):
        one, other = decoder("Llama").train(), decoder("Llama").train()
        observer = huggingface.observe(one, 1)
        other(**batch())
        assert observer.latest is None
        with huggingface.observe(other, 1) as second:
            other(**batch())
            assert observer.latest is None
            assert second.latest.step == 0
        with pytest.warns(UserWarning, match="the model had no forward pass in training mode"):
            observer.close()
        observer.close()  # once; warnings are errors
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning), huggingface.observe(one, 1):
                pass
        assert not one._forward_hooks  # also where the warning is an error
        assert not one._forward_pre_hooks

    def test_observations_do_not_change(self):
        model = decoder("Llama").train()
        with huggingface.observe(model, 1) as observer:
            model(**batch())
        x = observer.latest
        assert x.layers == ("model.layers.0.self_attn", "model.layers.1.self_attn")
        with pytest.raises(ValueError, match="read-only"):
            x.entropy[0, 0] = 1
        with pytest.raises(AttributeError):
            x.entropy = 1
        title, header, *rows = repr(x).splitlines()
        assert title == "Attention at step 0, over 4 heads a layer"
        assert [row.split()[0] for row in rows] == list(x.layers)
        assert header.split("  ")[-1].strip() == "largest logit"
        assert rows[1].split()[-1] == f"{x.largest_logit[1].max():.3f}"
        assert rows[1].split()[2] == f"{x.entropy[1].min():.3f}"
        scalars = x.scalars("a", heads=True)
        assert scalars["a/entropy/layer_1/mean"] == pytest.approx(x.entropy[1].mean())
        assert scalars["a/largest_logit/layer_0/max"] == x.largest_logit[0].max()
        assert scalars["a/normalized_entropy/layer_0/min"] == x.normalized_entropy[0].min()
        assert scalars["a/sink_mass/layer_1/head_3"] == x.sink_mass[1, 3]
        assert set(map(type, scalars.values())) == {float}

    def test_errors(self):
        model = decoder("Llama")
        with pytest.raises(TypeError, match="`model` must be a model of transformers"):
            huggingface.observe(torch.nn.Linear(2, 2))
        for name in ("every", "sequences", "patience"):
            with pytest.raises(ValueError, match=f"`{name}` must be"):
                huggingface.observe(model, **{name: 0})
        with pytest.raises(ValueError, match="`warn_below` must be"):
            huggingface.observe(model, warn_below=0.0)
        with pytest.raises(TypeError, match="`then` must be callable"):
            huggingface.observe(model, then=1)
        assert not model._forward_hooks

    def test_attention_of_its_own(self):
        model = mpnet()
        message = (
            "AttentionInterface .*to be observed, got MPNetModel, where MPNetSelfAttention does not"
        )
        with pytest.raises(ValueError, match=message):
            huggingface.observe(model)
        assert not model._forward_pre_hooks


def mpnet():
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    return transformers.MPNetModel(transformers.MPNetConfig(**sizes, num_hidden_layers=1))


class TestFailures:
    """What cannot be observed does not stop the training."""

    def test_sinks_of_every_query(self):
        model = special("Inkling2Loop").train()
        expected = step(model, batch())
        with huggingface.observe(model, 1) as observer:
            message = r"observed in model.layers.0.self_attn, .*: ValueError: `sinks` must be None"
            with pytest.warns(UserWarning, match=message) as record:
                got = step(model, batch())
            assert len(record) == 1
            step(model, batch())  # warnings are errors
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert observer.latest is None  # its attention over earlier layers is not observed

    @pytest.mark.parametrize("fails", [1, 2])
    def test_no_memory(self, monkeypatch, fails):
        """In the first of the two layers, or in both."""
        model, counted = decoder("Llama").train(), []
        expected = step(model, batch())

        def statistics(call, whole=_shared._statistics):
            counted.append(call)
            if len(counted) <= fails:
                raise torch.OutOfMemoryError("no memory")
            return whole(call)

        monkeypatch.setattr(_shared, "_statistics", statistics)
        seen = []
        with huggingface.observe(model, 1, then=seen.append, warn_below=1e-9) as observer:
            with pytest.warns(UserWarning, match="self_attn: OutOfMemoryError: no memory"):
                got = step(model, batch())
            assert len(counted) == 2
            assert len(seen) == 2 - fails
            assert (observer.latest is None) == (fails == 2)
            step(model, batch())
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert np.isfinite(seen[-1].entropy).all()
        assert np.isnan(seen[0].entropy).all(1).tolist() == [fails == 1, False]
        assert repr(seen[0]).count("self_attn  ") == 2

    def test_other_models_in_the_pass(self):
        """Attention of a model that is not observed is not even looked at."""
        model, other = decoder("Llama").train(), special("Inkling2Loop")
        handle = model.model.layers[0].register_forward_hook(lambda *_: other(**batch()) and None)
        with huggingface.observe(model, 1) as observer:
            step(model, batch())
        handle.remove()
        assert np.isfinite(observer.latest.entropy).all()

    def test_a_model_that_is_saved_whole(self, tmp_path):
        model = decoder("Llama").train()
        with huggingface.observe(model, 1) as observer:
            model(**batch())
            torch.save(model, tmp_path / "model.pt")
            latest = observer.latest
            loaded = torch.load(tmp_path / "model.pt", weights_only=False)
            assert torch.equal(loaded(**batch()).logits, model(**batch()).logits)
            assert observer.latest.step == 1
            assert latest.step == 0

    def test_errors_of_a_function_of_the_caller(self):
        def then(observation):
            raise KeyError(observation.step)

        model = decoder("Llama").train()
        with huggingface.observe(model, 1, then=then), pytest.raises(KeyError):
            model(**batch())


class TestAlarm:
    def test_collapsed_heads(self):
        model = decoder("Llama").train()

        def scaled(factor):
            return huggingface.use(model, laws.Constant(factor))

        def warned():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model(**batch())
            return [str(w.message) for w in caught if "attention entropy" in str(w.message)]

        with huggingface.observe(model, 1, warn_below=0.1, patience=2):
            with scaled(0.01):  # uniform
                assert [warned(), warned()] == [[], []]
            with scaled(1000.0):  # one key
                assert warned() == []
                (message,) = warned()
                assert warned() == []  # once
            assert "of model.layers.0.self_attn head 0, " in message
            assert message.endswith("and 3 more is below 0.1 log n in the last 2 observations.")
            with scaled(0.01):
                assert warned() == []
            with scaled(1000.0):
                assert warned() == []
                assert len(warned()) == 1


def test_qk_clip():
    """Factors of QK-Clip (arXiv 2507.20534) from the largest logits bring them to the threshold."""
    model = decoder("Llama", num_key_value_heads=4, num_hidden_layers=1).train()
    attention = model.model.layers[0].self_attn
    with huggingface.observe(model, 1) as observer:
        model(**batch())
        before = observer.latest.largest_logit[0]
        threshold = float(np.median(before))
        factor = torch.tensor(threshold / np.maximum(before, threshold)).float()
        with torch.no_grad():
            for projection in (attention.q_proj, attention.k_proj):
                projection.weight.view(4, 8, -1).mul_(factor.sqrt()[:, None, None])
        model(**batch())
    expected = np.minimum(before, threshold)
    assert expected.max() < before.max()
    np.testing.assert_allclose(observer.latest.largest_logit[0], expected, rtol=1e-5)


class TestTrainer:
    def trainer(self, folder, **options):
        pytest.importorskip("accelerate")  # which only the trainer needs
        from transformers import Trainer, TrainingArguments

        model = decoder("Llama")
        rows = [{"input_ids": x, "labels": x} for x in batch()["input_ids"].repeat(8, 1)]
        arguments = {
            "max_steps": 4, "logging_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True,
            "save_strategy": "no", "disable_tqdm": True, "report_to": "none", "seed": 0,
        }  # fmt: skip
        return Trainer(
            model, TrainingArguments(str(folder), **(arguments | options)), train_dataset=rows
        )

    @pytest.mark.parametrize("accumulation", [1, 2])
    def test_log(self, tmp_path, accumulation):
        plain = self.trainer(tmp_path, gradient_accumulation_steps=accumulation)
        plain.train()
        trainer = self.trainer(tmp_path, gradient_accumulation_steps=accumulation)
        seen = []

        def log(observation):
            seen.append(observation)
            trainer.log(observation.scalars(heads=True))

        with huggingface.observe(trainer.model, every=2 * accumulation, then=log):
            trainer.train()
        history = trainer.state.log_history
        logged = [x for x in history if "attention/entropy/layer_0/mean" in x]
        assert [x["step"] for x in logged] == [0, 2]
        for x, observation in zip(logged, seen, strict=True):
            assert x["attention/sink_mass/layer_1/head_2"] == observation.sink_mass[1, 2]
        # What the trainer logs without it is unchanged.
        for name in ("loss", "grad_norm", "learning_rate"):
            values = [[x[name] for x in h if name in x] for h in (history, plain.state.log_history)]
            assert values[0] == values[1]
            assert len(values[0]) == 2
        assert not trainer.model._forward_hooks

    def test_tensorboard(self, tmp_path, monkeypatch):
        pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
        trainer = self.trainer(tmp_path, report_to="tensorboard")
        with huggingface.observe(trainer.model, 2, then=lambda seen: trainer.log(seen.scalars())):
            trainer.train()
        events = dict(scalars_of_event_files(tmp_path / "board"))
        name = "attention/largest_logit/layer_1/max"
        logged = {x["step"]: x[name] for x in trainer.state.log_history if name in x}
        assert sorted(logged) == [0, 2]
        for at, value in logged.items():
            assert events[f"train/{name}", at] == pytest.approx(value, rel=1e-6)
        assert ("train/loss", 2) in events


def scalars_of_event_files(folder):
    """((name, step), value) of all scalars. A record is a length, its checksum, data, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    for path in folder.glob("events.*"):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    yield (value.tag, event.step), value.simple_value
