"""Laws in transformers' implementations agree with "isentropic" and with weights formed here.

FlashAttention needs a GPU: here its functions are replaced by PyTorch's. Flex attention is not compiled.
"""

import math
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import pytest
from packaging.version import Version

from isentropic import laws, masks

pytest.importorskip("minilm", reason="safetensors or tokenizers is not installed")
pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import flash_stub  # noqa: E402
import torch  # noqa: E402
from tiny_models import (  # noqa: E402
    DECODERS,
    SIDES,
    batch,
    close,
    decoder,
    encoder_decoder,
    outputs,
    special,
    step_by_step,
    with_positions,
)
from torch import nn  # noqa: E402
from torch.nn.attention import flex_attention as flex  # noqa: E402
from transformers.integrations import flex_attention as theirs  # noqa: E402

from isentropic.integrations import huggingface  # noqa: E402
from isentropic.integrations.huggingface import _calls, _interface  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]

BASES = ("eager", "sdpa", "flash_attention_2", "flex_attention")
# Gemma 2 has soft caps, gpt-oss has sinks. Its FlashAttention is a kernel to be downloaded.
UNSUPPORTED = {("Gemma2", "sdpa"), *(("GptOss", base) for base in BASES[1:])}
CASES = [(name, base) for name in DECODERS for base in BASES if (name, base) not in UNSUPPORTED]
SLOPE, INTERCEPT = torch.tensor([0.2, 0.5, 0.8, 1.1]), torch.tensor([0.9, 0.6, 0.3, 0.0])
LAW = laws.AffineLog(SLOPE, INTERCEPT)
GREEDY = {"max_new_tokens": 8, "do_sample": False}


def factor(n):
    return SLOPE[:, None] * torch.log(n.clamp(min=1).float()) + INTERCEPT[:, None]


@pytest.fixture(autouse=True)
def _kernels_of_the_cpu(monkeypatch):
    flash_stub.install(monkeypatch)
    monkeypatch.setattr(theirs, "WrappedFlexAttention", lambda training: lambda: flex.flex_attention)
    create = flex.create_block_mask
    monkeypatch.setattr(
        transformers.masking_utils,
        "create_block_mask",
        lambda *args, _compile, **kw: create(*args, **kw),
    )


@pytest.fixture
def reference(monkeypatch):
    """Attention that forms the weights; `n_keys` may give other numbers than those of the mask."""

    def attend(
        module, query, key, value, mask, scaling, softcap=None, s_aux=None, position_bias=0.0, **_
    ):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        if mask is None:
            mask = query.new_zeros(len(query), 1, query.shape[2], key.shape[2])
        n = attend.n_keys if attend.n_keys is not None else (mask == 0).sum(-1)
        logits = query @ key.mT * scaling * factor(n)[..., None]
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits + position_bias + mask
        if s_aux is not None:
            logits = torch.cat([logits, s_aux[:, None, None].expand(*logits.shape[:-1], 1)], -1)
        out = torch.softmax(logits, -1)[..., : value.shape[2]] @ value
        return out.transpose(1, 2), None

    attend.n_keys = None
    for interface, x in (
        (transformers.AttentionInterface, attend),
        (transformers.AttentionMaskInterface, transformers.masking_utils.eager_mask),
    ):
        monkeypatch.setitem(interface._global_mapping, "reference", x)
    return attend


def by_base(model, base, run, law=LAW, **options):
    with huggingface.use(model, law, base=base, **options):
        assert model.config._attn_implementation == base
        return run(model)


def by_reference(model, run):
    model.set_attn_implementation("reference")
    return run(model)


class TestValues:
    @pytest.mark.parametrize(("name", "base"), CASES)
    def test_decoders(self, reference, name, base):
        model = decoder(name)
        for side in (None, "left", "right"):
            run = partial(outputs, inputs=batch(side))
            got = by_base(model, base, run)
            close(got, by_base(model, "isentropic", run))
            assert (got - by_base(model, base, run, law=None)).abs().max() > 0.1
            close(got, by_reference(model, run))

    @pytest.mark.parametrize("base", BASES)
    def test_laws_that_are_infinite_without_keys(self, base):
        """Padding queries of the first layer are padding keys of the second."""

        @dataclass(frozen=True)
        class Falling(laws.Law):
            least: int

            def evaluate(self, xp, n):
                return 1 + 1 / n.clamp(min=self.least)

        model, run = decoder("Llama"), partial(outputs, inputs=batch("left"))
        got, expected = (by_base(model, base, run, law=Falling(least)) for least in (0, 1))
        close(got, expected)

    @SIDES
    @pytest.mark.parametrize("base", BASES)
    def test_positions(self, reference, base, side):
        model, inputs = decoder("Mistral"), with_positions(side)
        run = partial(outputs, inputs=inputs)
        got = by_base(model, base, run, count="positions")
        assert (got - by_base(model, base, run)).abs().max() > 0.1
        reference.n_keys = inputs["position_ids"][:, None] + 1
        close(got, by_reference(model, run))

    # In transformers a static cache moves the mask on before flex attention reads it.
    @pytest.mark.parametrize(
        ("base", "cache"),
        [(base, transformers.DynamicCache) for base in BASES]
        + [(base, transformers.StaticCache) for base in BASES[:3]],
    )
    @pytest.mark.parametrize("name", ["Qwen3", "Mistral"])
    def test_decoding_equals_prefill(self, name, base, cache):
        def run(model):
            return step_by_step(model, cache, "left"), outputs(model, with_positions("left"))

        close(*by_base(decoder(name), base, run))

    @pytest.mark.parametrize("base", BASES)
    def test_encoders(self, reference, base):
        torch.manual_seed(7)
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
        sizes |= {"initializer_range": 0.3}
        bert = transformers.BertConfig(**sizes, num_hidden_layers=2)
        windows = {"local_attention": 6, "global_attn_every_n_layers": 2}
        modern = transformers.ModernBertConfig(**sizes, num_hidden_layers=2, pad_token_id=0, **windows)
        for config in (bert, modern):
            model = transformers.AutoModel.from_config(config).eval()
            for side in (None, "left", "right"):
                run = partial(outputs, inputs=batch(side))
                close(by_base(model, base, run), by_reference(model, run))

    @pytest.mark.parametrize(
        ("name", "base"), [*(("Bart", base) for base in BASES), ("T5", "eager"), ("T5", "sdpa")]
    )
    def test_encoder_and_decoder(self, reference, name, base):
        model = encoder_decoder(name)
        # In transformers FlashAttention takes padding on the right for that of the queries.
        inputs = batch("left" if "flash" in base else "right")
        inputs |= {"decoder_input_ids": batch(length=7)["input_ids"]}

        @torch.no_grad()
        def run(model):
            return model(**inputs).logits

        close(by_base(model, base, run), by_reference(model, run), atol=2e-4)

    @pytest.mark.parametrize("base", BASES)
    def test_packed_sequences(self, base):
        ids = batch()["input_ids"][:1]
        positions = torch.cat([torch.arange(4), torch.arange(8)])[None]
        parts = (slice(0, 4), slice(4, 12))

        @torch.no_grad()
        def run(model):
            packed = model(ids, position_ids=positions, use_cache=False).logits
            return packed, torch.cat([model(ids[:, part]).logits for part in parts], 1)

        close(*by_base(decoder("Mistral"), base, run))

    def test_packed_sequences_of_flash_attention(self):
        model = decoder("Mistral")
        ids, ends = batch()["input_ids"], torch.tensor([0, 4, 12, 20, 24], dtype=torch.int32)
        packed = {
            "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 8, "max_length_k": 8,
            "position_ids": torch.cat([torch.arange(n) for n in ends.diff()])[None],
        }  # fmt: skip

        @torch.no_grad()
        def run(model):
            row = ids.reshape(1, -1)
            parts = [model(row[:, start:end]).logits for start, end in pairwise(ends)]
            return model(row, use_cache=False, **packed).logits, torch.cat(parts, 1)

        close(*by_base(model, "flash_attention_2", run))

    @pytest.mark.parametrize("base", ["eager", "sdpa"])
    def test_own_masks(self, reference, base):
        seen = torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(1)) < 0.5
        seen = seen | torch.eye(12, dtype=torch.bool)
        numbers = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
        ids = batch()["input_ids"]

        def run(model, mask=numbers):
            return model(ids, attention_mask=mask).logits.detach()

        model = decoder("Llama")
        expected = by_reference(model, run)
        close(by_base(model, base, run), expected)
        if base == "sdpa":
            close(by_base(model, base, partial(run, mask=seen)), expected)

    def test_weights(self):
        model = decoder("GptOss")

        @torch.no_grad()
        def run(model):
            return model(**batch("left"), output_attentions=True).attentions

        seen = batch("left")["attention_mask"].bool()
        got, expected = (by_base(model, base, run) for base in ("eager", "isentropic"))
        assert len(got) == 2
        for a, b in zip(got, expected, strict=True):
            close(a.transpose(1, 2)[seen], b.transpose(1, 2)[seen], atol=1e-5)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_rounded_queries(self, dtype):
        query, key = torch.randn(2, 8, 512, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
        n, law = torch.arange(1, 513), laws.LogLength(64)
        exact, got = (
            _interface._scaled(x, n, law).double() @ key.double().mT for x in (query.double(), query)
        )
        error = (got - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        # Measured: 0.0017 and 0.00021.
        assert 0.1 < error / torch.finfo(dtype).eps < 0.25

    @pytest.mark.parametrize("base", ["eager", "sdpa"])
    def test_half_precision(self, base):
        """The scaled queries are rounded, which is not seen among the other roundings of bfloat16."""
        exact = decoder("Llama", num_hidden_layers=1).bfloat16().float()
        model = decoder("Llama", num_hidden_layers=1).bfloat16()
        run = partial(outputs, inputs=batch("left"))

        def error(law):
            expected = by_base(exact, base, run, law=law)
            got = by_base(model, base, run, law=law)
            assert got.dtype == torch.bfloat16
            return (got.float() - expected).square().mean().sqrt()

        # Measured: 0.016, and 0.017 to 0.018 without a law.
        assert 0.01 < error(LAW) < 1.1 * error(None) < 0.02


class TestTraining:
    """Flex attention has no gradients on the CPU."""

    def gradients(self, model, base):
        slope, inputs = nn.Parameter(SLOPE.clone()), batch("right")
        model.zero_grad()
        with huggingface.use(model, laws.AffineLog(slope, 0.5), base=base):
            logits = model(**inputs, use_cache=False).logits[inputs["attention_mask"].bool()]
            logits.square().mean().backward()
        return [slope.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    @pytest.mark.parametrize(("name", "base"), [x for x in CASES if x[1] != "flex_attention"])
    def test_gradients(self, name, base):
        model = decoder(name).train()
        got, expected = (self.gradients(model, x) for x in (base, "isentropic"))
        assert got[0].abs().min() > 1e-3
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item())

    @pytest.mark.parametrize("base", ["isentropic", "eager", "sdpa", "flash_attention_2"])
    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_checkpointing(self, base, use_reentrant):
        model = decoder("Llama").train()
        expected = self.gradients(model, base)
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        for a, b in zip(self.gradients(model, base), expected, strict=True):
            close(a, b, atol=1e-6)

    @pytest.mark.parametrize("base", ["eager", "sdpa"])
    def test_dropout(self, base):
        """A law of 2 is twice the queries, in training too."""
        model = decoder("Llama", attention_dropout=0.5).train()

        def run(model):
            torch.manual_seed(1)
            return model(**batch("left")).logits.detach()

        got = by_base(model, base, run, law=laws.Constant(2.0))
        assert not torch.equal(got, by_base(model.eval(), base, run, law=laws.Constant(2.0)))
        model.train()
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.data *= 2
        model.set_attn_implementation(base)
        close(got, run(model), atol=1e-5)


class TestGeneration:
    @pytest.mark.parametrize(
        ("base", "cache"),
        [(base, "dynamic") for base in BASES] + [(base, "static") for base in BASES[:3]],
    )
    def test_generate(self, base, cache):
        model = decoder("Qwen3")

        def run(model, **options):
            return model.generate(**batch("left"), **GREEDY, **options)

        standard = by_base(model, base, run, law=None)
        expected = by_base(model, "isentropic", run)
        assert not torch.equal(standard, expected)
        options = {"cache_implementation": cache, "disable_compile": True}
        assert torch.equal(by_base(model, base, partial(run, **options)), expected)

    @pytest.mark.parametrize("base", ["isentropic", *BASES])
    def test_assisted(self, base):
        model, assistant = decoder("Llama"), decoder("Llama", num_hidden_layers=1)
        ids = batch()["input_ids"][:1]
        with huggingface.use(assistant, laws.LogLength(4), base=base):
            expected = by_base(model, base, lambda model: model.generate(ids, **GREEDY))
            got = by_base(model, base, lambda m: m.generate(ids, **GREEDY, assistant_model=assistant))
        assert torch.equal(got, expected)

    @pytest.mark.parametrize(
        "base",
        [
            "sdpa",
            *(pytest.param(x, marks=pytest.mark.nightly) for x in ("paged|eager", "flash_attention_2")),
        ],
    )
    def test_continuous_batching(self, base):
        pytest.importorskip("psutil", reason="transformers asks psutil how much memory there is")
        model = decoder("Qwen3")
        prompts = [[3, 4, 5, 6, 7, 8, 9, 10], [11, 12, 13], [20, 21, 22, 23, 24, 25]]
        settings = transformers.ContinuousBatchingConfig(
            auto_switch_to_flash=False, num_blocks=16, block_size=4
        )

        def one_by_one(model):
            return [model.generate(torch.tensor([x]), **GREEDY)[0, len(x) :].tolist() for x in prompts]

        def run(model):
            config = transformers.GenerationConfig(**GREEDY, eos_token_id=-1, pad_token_id=0)
            results = model.generate_batch(prompts, config, continuous_batching_config=settings)
            return [results[key].generated_tokens for key in sorted(results)]

        expected = by_base(model, "isentropic", one_by_one)
        assert expected != by_base(model, "isentropic", one_by_one, law=None)
        assert by_base(model, base, run) == expected

    @pytest.mark.parametrize("base", ["isentropic", "sdpa"])
    def test_compiled_with_a_static_cache(self, base):
        """One graph for all lengths, as without a law."""
        model, graphs = decoder("Llama", num_hidden_layers=1), []

        def backend(graph, inputs, **options):
            graphs.append(graph)
            return graph

        options = transformers.CompileConfig(backend=backend, fullgraph=True)
        options._compile_all_devices = True  # which leaves out the CPU otherwise
        compiled = {"cache_implementation": "static", "compile_config": options}
        torch._dynamo.reset()

        def run(model):
            return [model.generate(**batch("left"), **GREEDY, **x) for x in (compiled, {})]

        assert torch.equal(*by_base(model, base, run))
        assert len(graphs) == 1

    @pytest.mark.nightly
    def test_compiled_with_a_growing_cache(self):
        """Two graphs: one of the first length, and one of all. (Without a law it is two as well.)"""
        model, ids = decoder("Llama", num_hidden_layers=1), batch()["input_ids"]
        past = transformers.DynamicCache(config=model.config)
        counter = torch._dynamo.testing.CompileCounter()
        torch._dynamo.reset()
        compiled = torch.compile(model.forward, fullgraph=True, backend=counter)

        @torch.no_grad()
        def run(model):
            parts = [model(ids[:, :4], past_key_values=past).logits]
            for i in range(4, 12):
                options = {
                    "position_ids": torch.full((2, 1), i),
                    "attention_mask": torch.ones_like(ids[:, : i + 1]),
                }
                parts.append(compiled(ids[:, i : i + 1], past_key_values=past, **options).logits)
            return torch.cat(parts, 1), model(ids).logits

        close(*by_base(model, "sdpa", run))
        assert counter.frame_count == 2


class TestUse:
    def test_restores(self):
        model, inputs = decoder("Llama", attn_implementation="eager"), batch("left")
        standard = outputs(model, inputs)
        with huggingface.use(model, LAW, base="sdpa"):
            by_sdpa = outputs(model, inputs)
            with huggingface.use(model, laws.LogLength(4), base="eager"):
                assert (outputs(model, inputs) - by_sdpa).abs().max() > 0.1
            assert model.config._attn_implementation == "sdpa"
            assert torch.equal(outputs(model, inputs), by_sdpa)
        assert model.config._attn_implementation == "eager"
        assert torch.equal(outputs(model, inputs), standard)

    @pytest.mark.parametrize("base", ["eager", "sdpa"])
    def test_other_models_keep_theirs(self, base):
        model = decoder("Llama", attn_implementation=base)
        standard = outputs(model, batch())
        with huggingface.use(decoder("Llama"), LAW, base=base):
            assert torch.equal(outputs(model, batch()), standard)

    def test_repeated(self):
        """The functions are replaced once."""
        model = decoder("Llama")
        huggingface.use(model, LAW, base="eager")
        functions = dict(transformers.AttentionInterface())
        expected = outputs(model, batch())
        huggingface.use(model, LAW, base="eager")
        assert dict(transformers.AttentionInterface()) == functions
        assert torch.equal(outputs(model, batch()), expected)

    @pytest.mark.parametrize(
        ("base", "error", "message"),
        [
            (3, TypeError, r"`base` must be the name of an attention implementation, got int"),
            (
                "spda",
                ValueError,
                r"`base` must be 'eager', .* of the Hub, or one of .*'sdpa'.*, got 'spda'",
            ),
        ],
    )
    def test_arguments(self, base, error, message):
        model = decoder("Llama")
        with pytest.raises(error, match=message):
            huggingface.use(model, LAW, base=base)
        assert model.config._attn_implementation == "sdpa"

    @pytest.mark.skipif(
        Version(transformers.__version__) < Version("5.21"),
        reason="until transformers 5.21 its Gemma 2 takes sdpa, and loses its soft cap",
    )
    def test_what_transformers_refuses(self):
        model = decoder("Gemma2")
        with pytest.raises(ValueError, match="scaled_dot_product_attention"):
            huggingface.use(model, LAW, base="sdpa")
        assert model.config._attn_implementation == "eager"
        assert not any(hasattr(module, "isentropic_law") for module in model.modules())


class TestLookup:
    """A law acts on whatever function transformers looks up."""

    def test_registered_again(self, monkeypatch):
        model, forward = decoder("Llama"), transformers.AttentionInterface()["sdpa"]
        huggingface.use(model, laws.LogLength(4), base="sdpa")
        expected = outputs(model, batch())
        again = {"sdpa": lambda *args, **kwargs: forward.__wrapped__(*args, **kwargs)}
        monkeypatch.setattr(
            transformers.AttentionInterface,
            "_global_mapping",
            transformers.AttentionInterface._global_mapping | again,
        )
        assert torch.equal(outputs(model, batch()), expected)

    @pytest.mark.nightly
    def test_pickled_for_another_process(self, tmp_path):
        saved = []
        for base in ("sdpa", "eager"):
            model = decoder("Llama")
            huggingface.use(model, laws.LogLength(4), base=base)
            saved.append((model, batch(), outputs(model, batch())))
        torch.save(saved, tmp_path / "models.pt")
        code = f"""
import torch
saved = torch.load({str(tmp_path / "models.pt")!r}, weights_only=False)
assert len(saved) == 2
for model, inputs, expected in saved:
    with torch.no_grad():
        got = model(**inputs)[0][inputs["attention_mask"].bool()]
    torch.testing.assert_close(got, expected)
"""
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


class TestRefused:
    """What a base does not support is refused by the first call, and another base works."""

    @pytest.mark.filterwarnings("ignore:The model .* a rule of its own:UserWarning")
    @pytest.mark.filterwarnings("ignore:The model already scales:UserWarning")
    @pytest.mark.parametrize(
        ("name", "refused", "bases"),
        [("DeepseekV32", "indices", ("eager", "sdpa")), ("Inkling2Loop", "sinks", ("eager",))],
    )
    def test_arguments(self, name, refused, bases):
        model, law = special(name), laws.LogLength(4)
        standard, before = outputs(model, batch()), model.config._attn_implementation
        must = f"`{refused}` must be None: isentropic does not support it .*implementation 'eager' may"
        for options in ({}, {"base": "isentropic"}, {"count": "positions"}):
            with huggingface.use(model, law, **options), pytest.raises(ValueError, match=must):
                outputs(model, batch())
            assert model.config._attn_implementation == before
        got = [by_base(model, base, lambda model: outputs(model, batch()), law) for base in bases]
        assert (got[0] - standard).abs().max() > 0.1
        close(got[0], got[-1])
        huggingface.use(model, None)
        assert torch.equal(outputs(model, batch()), standard)

    def test_indices_of_another_implementation(self, monkeypatch):
        """It takes the indices that decide what a query sees."""
        interface = transformers.AttentionInterface._global_mapping
        monkeypatch.setitem(interface, "own", interface["sdpa"])
        masks = transformers.AttentionMaskInterface._global_mapping
        monkeypatch.setitem(masks, "own", masks["sdpa"])
        model = special("DeepseekV32")
        must = r"`count` must be 'positions' where .* got 'keys' with the argument `indices` of sparse"
        with huggingface.use(model, LAW, base="own"), pytest.raises(ValueError, match=must):
            outputs(model, batch())

    def test_measured_by_the_code_of_the_model(self):
        model = special("DeepseekV32")
        (law, _) = huggingface.calibrate(model, [batch()["input_ids"]], reference_length=5).laws
        assert law(5).shape == (4,)
        assert model.config._attn_implementation == "sdpa"


class TestUnknownCounts:
    """An error, and not the wrong number."""

    def test_own_implementation(self, monkeypatch):
        def twice(module, query, key, value, mask, **kwargs):
            return torch.zeros_like(query).transpose(1, 2), None

        monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "own", twice)
        model = decoder("Llama")
        with pytest.raises(ValueError, match=r"`count` must be 'positions' where .* an unknown kind"):
            by_base(model, "own", lambda model: model(**batch()))
        by_base(model, "own", lambda model: model(**batch()), count="positions")

    @pytest.mark.parametrize(
        ("base", "mask", "options", "what"),
        [
            ("flash_attention_2", torch.ones(1, 1, 6, 6), {}, r"a mask of shape \(1, 1, 6, 6\)"),
            ("sdpa", torch.ones(1, 6, dtype=torch.bool), {}, r"a mask of shape \(1, 6\)"),
            *(
                (base, None, {name: 1}, f"the argument `{name}` of sparse attention")
                for base in ("eager", "sdpa", "flash_attention_2")
                for name in ("indices", "block_indices")
            ),
        ],
    )
    def test_arguments(self, base, mask, options, what):
        query = torch.ones(1, 2, 6, 8)
        with pytest.raises(
            ValueError, match=f"`count` must be 'positions' where .* got 'keys' with {what}"
        ):
            _calls.counted_keys(base, nn.Module(), query, query, mask, options)


class TestBlocks:
    def windows(self):
        return flex.create_block_mask(
            lambda b, h, i, j: (j <= i + 60) & (i - j + 60 < 90 + 10 * b + 20 * h),
            2,
            3,
            300,
            360,
            "cpu",
        )

    @pytest.mark.parametrize("tile", [2**24, 128])
    def test_functions(self, set_blocks, tile):
        set_blocks(count_tile=tile)
        got = _calls._InBlocks(self.windows()).visible_count(300, 360, like=torch.empty(0))
        for b in range(2):
            for h in range(3):
                window = masks.window(89 + 10 * b + 20 * h).visible_count(300, 360)
                assert got[b, h].tolist() == window.tolist()

    def test_blocks_without_a_function(self):
        mask = flex.BlockMask.from_kv_blocks(
            kv_num_blocks=torch.tensor([[[1, 2]]]), kv_indices=torch.tensor([[[[1, 0], [0, 1]]]]),
            full_kv_num_blocks=None, full_kv_indices=None, BLOCK_SIZE=128, seq_lengths=(200, 256),
        )  # fmt: skip
        got = _calls._InBlocks(mask).visible_count(200, 256, like=torch.empty(0))
        assert got.tolist() == [[[128] * 128 + [256] * 72]]

    def test_counted_once(self, monkeypatch):
        calls = []
        count = masks.Mask.count
        monkeypatch.setattr(
            masks.Mask, "count", lambda *args, **of: calls.append(0) or count(*args, **of)
        )
        for name in ("Qwen3", "Llama"):
            by_base(decoder(name), "flex_attention", partial(outputs, inputs=batch()))
        assert (
            len(calls) == 3
        )  # Qwen 3 has windows and full attention; two layers of Llama share a mask

    def test_a_mask_of_numbers(self):
        query = torch.ones(1, 2, 3, 8)
        mask = torch.tensor([[[[0.0, -math.inf], [0.0, -1.0], [-math.inf, -math.inf]]]])
        n = _calls.counted_keys("flex_attention", nn.Module(), query, query[:, :, :2], mask, {})
        assert n.tolist() == [[[1, 2, 0]]]
