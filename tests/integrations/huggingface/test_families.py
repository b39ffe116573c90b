"""Families that compute their attention themselves agree with their code with scaled weights."""

import copy
import importlib
import inspect
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from isentropic import laws

pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("minilm", reason="safetensors or tokenizers is not installed")

import torch  # noqa: E402
from tiny_models import SIDES, batch, close, outputs, with_positions  # noqa: E402
from torch import nn  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

from isentropic.integrations import huggingface  # noqa: E402
from isentropic.integrations.huggingface import _hooks, _measure, _modules  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

HEADS = 4
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
GPT = {"n_embd": 32, "n_layer": 2, "n_head": HEADS, "n_positions": 64}
XLM = {"emb_dim": 32, "n_layers": 2, "n_heads": HEADS}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
FUNNEL = {"d_model": 32, "n_head": HEADS, "d_head": 8, "d_inner": 48, "block_sizes": [1, 1]}
ENCODERS = {
    "BigBird": {"attention_type": "original_full"},
    "Canine": {},
    "ConvBert": {"embedding_size": 32, "head_ratio": 1},
    "Deberta": {**RELATIVE, "max_relative_positions": -1},
    "DebertaV2": {**RELATIVE, "share_att_key": True, "position_buckets": 8},
    "Flaubert": XLM,
    "Funnel": {**FUNNEL, "num_hidden_layers": None},
    "IBert": {},
    "Luke": {"entity_vocab_size": 10, "entity_emb_size": 8},
    "MPNet": {},
    "MegatronBert": {},
    "RemBert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "RoFormer": {"embedding_size": 32},
    "SqueezeBert": {"embedding_size": 32, "q_groups": 1},
    "Tapas": {},
    "XLM": XLM,
}
NEW_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2}
DECODERS = {
    "Bloom": {"n_layer": 2, "n_head": HEADS},
    "CodeGen": {**GPT, "rotary_dim": 4},
    "Falcon": {"new_decoder_architecture": False, "multi_query": True},
    "Falcon, grouped": NEW_FALCON,
    "Falcon, ALiBi": {"alibi": True, "multi_query": False},
    "GPTJ": {**GPT, "rotary_dim": 4},
    "GPTNeo": {"num_layers": 2, "num_heads": HEADS, "window_size": 5},
    "GPTNeoXJapanese": {},
    "Mpt": {"d_model": 32, "n_heads": HEADS, "n_layers": 2, "max_seq_len": 64},
    "OpenAIGPT": GPT,
    "XGLM": {"d_model": 32, "num_layers": 2, "attention_heads": HEADS, "ffn_dim": 48},
}
ALL = ENCODERS | DECODERS


def tiny(name, **changes):
    kind = name.partition(",")[0]
    options = {**SIZES, **ALL[name], **changes}
    if kind == "GPTNeo":
        options["attention_types"] = [[["local"], options["num_layers"]]]
    options = {key: x for key, x in options.items() if x is not None}
    config = getattr(transformers, f"{kind}Config")(**options)
    torch.manual_seed(7)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    draws = torch.Generator().manual_seed(7)
    for p in model.parameters():  # large enough for attention that is far from uniform
        p.data = p + 0.3 * torch.randn(p.shape, generator=draws)
    return model


def one_layer(name):
    names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    return tiny(name, **{key: 1 for key in names if key in {**SIZES, **ALL[name]}})


class Softmax(TorchFunctionMode):
    """Keeps the logits and the weights of attention, and multiplies the logits by factors."""

    def __init__(self, factors=None):
        self.factors, self.logits, self.weights = factors, [], []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") == "softmax" and (
            kwargs.get("dim") == -1 or args[1:2] == (-1,)
        ):
            logits = args[0].reshape(-1, HEADS, *args[0].shape[-2:])
            self.logits.append(logits)
            if self.factors is not None:
                scaled = (logits * self.factors[:, None, None]).clamp(min=torch.finfo(logits.dtype).min)
                args = (scaled.reshape(args[0].shape), *args[1:])
            self.weights.append(function(*args, **kwargs).reshape(logits.shape))
        return function(*args, **kwargs)


def scale_queries_by_hand(module, family, factors):
    """Multiply the weights that give queries by a factor for each head of 8 features."""
    child = module.get_submodule(family.child)
    features = torch.arange(max(child.weight.shape))
    if max(child.weight.shape) == 32:
        head, is_query = features // 8, features >= 0
    elif "CodeGen" in type(module).__name__:  # in blocks of one head: query, value, key
        head, is_query = features // 24, features % 24 < 8
    elif "Mpt" in type(module).__name__ or family.child in (
        "c_attn",
        "qkv",
    ):  # all queries, all keys, all values
        head, is_query = features // 8 % HEADS, features < 32
    elif getattr(module, "new_decoder_architecture", False):  # in groups of two queries, a key, a value
        head, is_query = features // 32 * 2 + features // 8 % 4, features % 32 < 16
    elif getattr(module, "multi_query", False):  # all queries, a key, a value
        head, is_query = features // 8, features < 32
    else:  # in each head: query, key, value
        head, is_query = features // 24, features % 24 < 8
    factor = torch.ones(len(features))
    factor[is_query] = factors[head[is_query]]
    child.weight.data *= factor[:, None] if isinstance(child, nn.Linear) else factor
    if child.bias is not None:
        child.bias.data *= factor


@torch.no_grad()
def outputs_by_hand(name, inputs, factors):
    """The output if the products of queries and keys are multiplied by a factor for each head."""
    model, acts_on_logits = tiny(name), False
    for module in model.modules():
        family = _modules.FAMILIES.get(_modules.class_name(module))
        if family is not None and family.query is not None:
            scale_queries_by_hand(module, family, factors)
        acts_on_logits = acts_on_logits or (family is not None and family.query is None)
    if not acts_on_logits:
        return outputs(model, inputs)
    with Softmax(factors):
        return outputs(model, inputs)


class TestEquality:
    @SIDES
    @pytest.mark.parametrize("name", ALL)
    def test_without_laws(self, name, side):
        model = tiny(name)
        expected = outputs(model, batch(side))
        with huggingface.use(model, None, base="isentropic"):
            close(outputs(model, batch(side)), expected, atol=5e-6)
        with huggingface.use(model, laws.Constant(1.0)):
            close(outputs(model, batch(side)), expected)
        assert torch.equal(outputs(model, batch(side)), expected)

    @SIDES
    @pytest.mark.parametrize("name", ALL)
    def test_constants_of_heads(self, name, side):
        factors = torch.tensor([1.7, 0.6, 1.2, 0.9])
        model = tiny(name)
        standard = outputs(model, batch(side))
        expected = outputs_by_hand(name, batch(side), factors)
        huggingface.use(model, laws.AffineLog(0.0, factors))
        close(outputs(model, batch(side)), expected, atol=1e-4)
        assert (expected - standard).abs().max() > 0.05

    @pytest.mark.parametrize("name", ENCODERS)
    def test_padding_is_not_counted(self, name):
        """A text of 8 tokens among padding has the law of 8 keys."""
        model, inputs, law = tiny(name), batch("right"), laws.LogLength(4)
        text = {key: x[1:, :8] for key, x in inputs.items()}
        with huggingface.use(model, law):
            padded = outputs(model, inputs)[12:]
            alone = outputs(model, text)
        with huggingface.use(model, laws.Constant(float(law(8)))):
            expected = outputs(model, text)
        if name in CONTEXT_BEYOND_ATTENTION:
            assert (padded - outputs(model, inputs)[12:]).abs().max() > 0.01
        else:
            close(padded, expected, atol=1e-4)
        if name != "Canine":  # whose tokens are pooled
            close(alone, expected, atol=1e-4)

    @pytest.mark.parametrize("name", DECODERS)
    def test_each_query_has_its_own_number_of_keys(self, name):
        model, law, ids = one_layer(name), laws.LogLength(4), batch()["input_ids"]
        with torch.no_grad():
            with huggingface.use(model, law):
                got = model(ids)[0]
            for length in range(2, 13):
                n = min(length, 5) if name == "GPTNeo" else length
                with huggingface.use(model, laws.Constant(float(law(n)))):
                    close(got[:, length - 1], model(ids[:, :length])[0][:, -1], atol=1e-4)


# They pool positions, or convolve them.
CONTEXT_BEYOND_ATTENTION = ("Canine", "ConvBert", "Funnel")


class Collector:
    def __init__(self, argument, factors=(0.5, 1.0, 2.0)):
        self.factors, self.rows = factors, []

    def add(self, *row, weight=1.0):
        self.rows.append(row)

    def report(self):
        return self


class TestMeasuring:
    @SIDES
    @pytest.mark.parametrize("name", ALL)
    def test_counts_and_entropies(self, monkeypatch, name, side):
        monkeypatch.setattr(_measure, "Recorder", Collector)
        model, inputs = tiny(name), batch(side)
        model.config._attn_implementation = "eager"
        with Softmax() as softmax:
            outputs(model, inputs)
        got = huggingface.profile(model, [inputs])
        assert len(got.rows) == len(softmax.logits)
        for (_, n, entropies, counted), logits, p in zip(
            got.rows, softmax.logits, softmax.weights, strict=True
        ):
            visible = logits > -9000  # OpenAI's GPT hides keys by -10000, others by more
            counts = visible.sum(-1)[:, 0]
            assert counted.any(-1).all()
            n = n.expand(counts.shape)
            assert torch.equal(n[counted], counts[counted])
            close(entropies[1].mT[counted], -torch.xlogy(p, p).sum(-1).mT[counted], atol=1e-4)
            if counted.shape == (2, 12):
                assert torch.equal(counted, inputs["attention_mask"].bool())

    @pytest.mark.parametrize("name", ["Bloom", "Deberta", "MPNet"])
    def test_factors_multiply_the_law(self, monkeypatch, name):
        monkeypatch.setattr(_measure, "Recorder", Collector)
        model = tiny(name)
        got = huggingface.profile(model, [batch()], laws=laws.Constant(1.5))
        for further, measured in zip(got.factors, got.rows[0][2], strict=True):
            expected = huggingface.profile(model, [batch()], laws=laws.Constant(1.5 * further))
            close(measured, expected.rows[0][2][1], atol=1e-5)

    @pytest.mark.parametrize("name", ["Bloom", "GPTNeo"])
    def test_caches(self, name):
        model = tiny(name)
        cache = model(batch()["input_ids"], use_cache=True).past_key_values
        second = {"input_ids": torch.ones(2, 2, dtype=int), "past_key_values": cache}
        with pytest.raises(ValueError, match="`model` must have no cache, got one of 12 keys"):
            huggingface.profile(model, [second])

    def test_calibrate(self):
        model = tiny("MPNet")
        batches = [torch.randint(3, 64, (8, n)) for n in (8, 16, 32)]
        fitted = huggingface.calibrate(model, batches, reference_length=16).laws
        before = huggingface.profile(model, batches)
        after = huggingface.profile(model, batches, laws=fitted)
        assert abs(after.slope).mean() < 0.4 * abs(before.slope).mean()


@torch.no_grad()
def step_by_step(model, side):
    inputs = with_positions(side)
    mask, past, parts = inputs["attention_mask"], None, []
    accepted = model.forward.__code__.co_varnames
    for start, end in [(0, 5), *((i, i + 1) for i in range(5, 12))]:
        options = (
            {"position_ids": inputs["position_ids"][:, start:end]} if "position_ids" in accepted else {}
        )
        out = model(
            inputs["input_ids"][:, start:end], attention_mask=mask[:, :end], past_key_values=past,
            use_cache=True, **options,
        )  # fmt: skip
        past = out.past_key_values
        parts.append(out[0])
    return torch.cat(parts, 1)[mask.bool()]


class TestDecoding:
    @pytest.mark.parametrize("side", [None, "left"])
    @pytest.mark.parametrize("name", [name for name in DECODERS if name != "OpenAIGPT"])
    def test_equals_prefill(self, name, side):
        model, inputs = tiny(name), with_positions(side)
        if "position_ids" not in model.forward.__code__.co_varnames:
            del inputs["position_ids"]
        huggingface.use(model, laws.AffineLog(torch.tensor([0.2, 0.5, 0.8, 1.1]), 0.3))
        close(step_by_step(model, side), outputs(model, inputs), atol=1e-4)

    @pytest.mark.parametrize("name", ["CodeGen", "Falcon", "GPTJ"])
    def test_positions(self, name):
        model, law = tiny(name), laws.AffineLog(0.5, 0.4)
        with huggingface.use(model, law):
            of_keys = outputs(model, batch())
        huggingface.use(model, law, count="positions")
        close(outputs(model, batch()), of_keys)
        close(step_by_step(model, None), of_keys, atol=1e-4)

    def test_no_masks(self):
        """MVP without padding: in the encoder, across, and of a single token after the cache."""
        sizes = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": HEADS,
                 "decoder_attention_heads": HEADS, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
                 "d_model": 32, "init_std": 0.3, "vocab_size": 64}  # fmt: skip
        torch.manual_seed(7)
        config = transformers.MvpConfig(**sizes, pad_token_id=0, bos_token_id=1)
        model = transformers.MvpModel(config).eval()
        source, ids = batch()["input_ids"], batch()["input_ids"][:, :6]
        with torch.no_grad(), huggingface.use(model, laws.LogLength(4)):
            whole = model(source, decoder_input_ids=ids, use_cache=False)[0]
            past, parts = None, []
            for i in range(6):
                out = model(
                    source, decoder_input_ids=ids[:, i : i + 1], past_key_values=past, use_cache=True
                )
                past = out.past_key_values
                parts.append(out[0])
        close(torch.cat(parts, 1), whole, atol=1e-4)
        law = laws.LogLength(source.shape[1])  # which is 1 in the encoder and across
        with torch.no_grad(), huggingface.use(model, {"decoder.layers.*.self_attn": law}):
            expected = model(source, decoder_input_ids=ids)[0]
        with torch.no_grad(), huggingface.use(model, law):
            close(model(source, decoder_input_ids=ids)[0], expected)

    def test_no_masks_after_a_cache(self):
        torch.manual_seed(7)
        config = transformers.ImageGPTConfig(vocab_size=65, n_embd=32, n_layer=2, n_head=HEADS)
        model, ids = transformers.ImageGPTModel(config).eval(), batch()["input_ids"]
        for p in model.parameters():
            p.data = p + 0.3 * torch.randn(p.shape)
        with torch.no_grad():
            standard = model(ids)[0]
            huggingface.use(model, laws.LogLength(4))
            whole, past, parts = model(ids)[0], None, []
            for i in range(ids.shape[1]):
                out = model(ids[:, i : i + 1], past_key_values=past, use_cache=True)
                past = out.past_key_values
                parts.append(out[0])
        close(torch.cat(parts, 1), whole, atol=1e-4)
        assert (whole - standard).abs().max() > 1e-3

    @pytest.mark.parametrize("name", ["Bloom", "MPNet"])
    def test_models_without_positions(self, name):
        model = tiny(name)
        huggingface.use(model, laws.LogLength(4), count="positions")
        with pytest.raises(ValueError, match="`count` must be 'keys' if a model passes no"):
            model(**batch())


class TestHooks:
    def test_nothing_is_left_behind(self):
        model = tiny("Falcon", attn_implementation="sdpa")
        before = {name: set(vars(module)) for name, module in model.named_modules()}
        with huggingface.use(model, laws.LogLength(4)):
            with huggingface.use(model, laws.LogLength(8)):
                outputs(model, batch())
            outputs(model, batch())
        assert model.config._attn_implementation == "sdpa"
        for name, module in model.named_modules():
            assert set(vars(module)) == before[name]
            assert not module._forward_hooks
            assert not module._forward_pre_hooks

    def test_within_each_other(self):
        model = tiny("Bloom")
        with huggingface.use(model, laws.LogLength(4)):
            outer = outputs(model, batch())
            with huggingface.use(model, laws.LogLength(8)):
                assert (outputs(model, batch()) - outer).abs().max() > 0.01
            assert torch.equal(outputs(model, batch()), outer)

    @pytest.mark.parametrize("name", ["Bloom", "MPNet"])
    @pytest.mark.parametrize("base", ["sdpa", "eager"])
    def test_other_bases(self, name, base):
        """The modules keep their own code, and their own masks."""
        model = tiny(name)
        with huggingface.use(model, laws.LogLength(4)):
            expected = outputs(model, batch("right"))
        with huggingface.use(model, laws.LogLength(4), base=base):
            assert torch.equal(outputs(model, batch("right")), expected)
        assert (outputs(model, batch("right")) - expected).abs().max() > 0.01

    def test_copies(self):
        model = tiny("MPNet")
        huggingface.use(model, laws.LogLength(4))
        expected, twin = outputs(model, batch()), copy.deepcopy(model)
        huggingface.use(model, None)
        assert torch.equal(outputs(twin, batch()), expected)
        assert not torch.equal(outputs(model, batch()), expected)

    def test_modules_that_are_replaced(self):
        """As by adapters, whose part of the query would have no law."""
        model = tiny("MPNet")
        expected = outputs(model, batch())
        attention = model.get_submodule(next(iter(huggingface.laws_of(model))))
        with huggingface.use(model, laws.LogLength(4)):
            attention.q = copy.deepcopy(attention.q)
            attention.q._forward_hooks.clear()
            with pytest.raises(ValueError, match=r"\(call it again\), got another `q`"):
                outputs(model, batch())
        assert torch.equal(outputs(model, batch()), expected)

    def test_errors_do_not_leave_a_law(self):
        model = tiny("MPNet")
        expected = outputs(model, batch())
        module = model.get_submodule(list(huggingface.laws_of(model))[1])
        with huggingface.use(model, laws.LogLength(4)), torch.no_grad():
            handle = module.o.register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(**batch())
            handle.remove()
        assert torch.equal(outputs(model, batch()), expected)
        assert not any("pending" in name for child in model.modules() for name in vars(child))

    def test_an_interrupt_leaves_no_law(self):
        """PyTorch calls no hook after an error that is no Exception."""
        model = tiny("DebertaV2")
        expected = outputs(model, batch())
        module = model.get_submodule(next(iter(huggingface.laws_of(model))))

        def interrupt(*_):
            raise KeyboardInterrupt

        with huggingface.use(model, laws.Constant(3.0)), torch.no_grad():
            handle = module.pos_dropout.register_forward_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(**batch())
            handle.remove()
        with huggingface.use(model, {1: laws.Constant(1.0)}):
            close(outputs(model, batch()), expected)
        assert not any("pending" in name for child in model.modules() for name in vars(child))

    def test_threads(self):
        """Each call has the law and the n of its own thread."""
        model = tiny("GPTNeo")
        inputs = [batch(length=n) for n in (5, 9, 14, 20)]
        with huggingface.use(model, laws.LogLength(4)), ThreadPoolExecutor(4) as pool:
            expected = [outputs(model, x) for x in inputs]
            found = pool.map(lambda i: outputs(model, inputs[i % 4]), range(100))
            assert all(torch.equal(x, expected[i % 4]) for i, x in enumerate(found))

    @pytest.mark.parametrize("name", ["Bloom", "DebertaV2"])
    def test_gradients_of_parameters(self, name):
        model, inputs = tiny(name), batch("right")
        slope = nn.Parameter(torch.full((HEADS,), 0.3))

        def loss(model):
            return model(**inputs)[0].square().sum()

        huggingface.use(model, laws.AffineLog(slope, 0.5))
        loss(model).backward()
        grad = slope.grad[1].item()
        assert torch.isfinite(
            torch.stack([p.grad.abs().max() for p in model.parameters() if p.grad is not None])
        ).all()
        step, losses = 1e-3, []
        with torch.no_grad():
            for shift in (step, -2 * step):
                slope[1] += shift
                losses.append(loss(model).item())
        assert grad == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=0.05)

    @pytest.mark.parametrize("name", ["Bloom", "Deberta", "MPNet"])
    def test_half_precision(self, name):
        model, law = tiny(name), laws.AffineLog(0.5, 0.3)
        huggingface.use(model, law)
        exact = outputs(model, batch("right"))
        got = outputs(model.bfloat16(), batch("right"))
        assert got.dtype == torch.bfloat16
        assert (got - exact).abs().mean() < 0.05 * exact.abs().mean()

    @pytest.mark.parametrize(
        "name",
        [
            "Bloom",
            *(pytest.param(x, marks=pytest.mark.nightly) for x in ("Deberta", "MPNet")),
        ],
    )
    def test_compiled(self, name):
        model = one_layer(name)
        huggingface.use(model, laws.LogLength(4))
        compiled = torch.compile(model, backend="eager")
        close(outputs(compiled, batch("right")), outputs(model, batch("right")))

    def test_compiled_in_part(self):
        """After breaks of the graph and too many compilations, some hooks are compiled and others not."""
        layers = 4
        model = tiny("Bloom", n_layer=layers, num_hidden_layers=layers)
        for name in huggingface.laws_of(model):
            module = model.get_submodule(name)
            module.dense.register_forward_pre_hook(torch.compiler.disable(lambda *_: None))
        torch.compiler.reset()
        own = [laws.LogLength(i + 2) for i in range(layers)]
        with huggingface.use(model, own), torch._dynamo.config.patch(recompile_limit=8):
            compiled = torch.compile(model, backend="eager")
            for length in (12, 13, 14):
                inputs = batch("right", length=length)
                close(outputs(compiled, inputs), outputs(model, inputs))
        torch.compiler.reset()


class TestModules:
    """Attention modules alone, of models that need further inputs."""

    STATES = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1))
    MASK = torch.where(torch.arange(6) < torch.tensor([[6], [4]]), 0.0, torch.finfo(torch.float32).min)
    CASES: ClassVar = {  # by name of the class: options, and inputs beside the states
        "bros.BrosSelfAttention": ({"dim_bbox_projection": 8}, {"bbox_pos_emb": torch.ones(6, 6, 2, 8), "attention_mask": MASK[:, None, None]}),
        "blip_text.BlipTextSelfAttention": (
            {}, {"encoder_hidden_states": STATES[:, :5], "encoder_attention_mask": MASK[:, None, None, :5],
                 "attention_mask": torch.zeros(2, 1, 1, 6)},
        ),
        "lxmert.LxmertAttention": ({}, {"context": STATES[:, :5], "attention_mask": MASK[:, None, None, :5]}),
        "mgp_str.MgpstrAttention": ({}, {}),
        "mobilevit.MobileViTSelfAttention": ({"hidden_size": 32}, {}),
        "speecht5.SpeechT5Attention": ({}, {"position_bias": torch.ones(6, 6, 8) / 3, "attention_mask": MASK[:, None, None].expand(2, 1, 6, 6)}),
        "timesformer.TimesformerSelfAttention": ({}, {}),
        "tvp.TvpAttention": ({}, {"attention_mask": MASK[:, None, None]}),
        "vilt.ViltSelfAttention": ({}, {"attention_mask": MASK[:, None, None]}),
    }  # fmt: skip

    def module(self, name, options):
        file, _, kind = name.partition(".")
        folder = file.removesuffix("_text")
        code = importlib.import_module(f"transformers.models.{folder}.modeling_{file}")
        torch.manual_seed(7)
        if file == "speecht5":
            return code.SpeechT5Attention(32, HEADS).eval()
        prefix = kind.removesuffix("SelfAttention").removesuffix("Attention")
        config = "MgpstrConfig" if file == "mgp_str" else f"{prefix}Config"
        config = getattr(transformers, config)(hidden_size=32, num_attention_heads=HEADS, **options)
        if file == "blip_text":
            config.encoder_hidden_size = 32
        more = {"mobilevit": [32], "blip_text": [True]}.get(file, [])
        return getattr(code, kind)(config, *more).eval()

    @pytest.mark.parametrize("name", CASES)
    def test_law(self, monkeypatch, name):
        options, inputs = self.CASES[name]
        options = {key: x for key, x in options.items() if key != "hidden_size"}
        n_keys = 5 if {"context", "encoder_hidden_states"} & inputs.keys() else 6
        n = torch.tensor([n_keys, 4 if inputs.get("attention_mask") is not None else n_keys])
        law = laws.AffineLog(torch.tensor([0.2, 0.5, 0.8, 1.1]), 0.3)
        module, family = self.module(name, options), _modules.FAMILIES[name]
        monkeypatch.setattr(_hooks, "law_of", lambda _: (law, "keys"))
        with torch.no_grad():
            standard = module(self.STATES, **inputs)
            with _hooks.hooks([module]):
                got = module(self.STATES, **inputs)
            for row in range(2):
                by_hand = self.module(name, options)
                scale_queries_by_hand(by_hand, family, law(n)[:, row])
                expected = by_hand(self.STATES, **inputs)
                first = [x if torch.is_tensor(x) else x[0] for x in (got, expected, standard)]
                close(first[0][row], first[1][row], atol=1e-5)
                assert (first[0][row] - first[2][row]).abs().max() > 1e-4


class TestRefused:
    @pytest.mark.parametrize(
        ("kind", "options", "message"),
        [
            ("BigBird", {"attention_type": "block_sparse"}, "each query sees a block"),
            (
                "XLNet",
                {"d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 48},
                "several streams of queries",
            ),
            ("Mamba", {}, r"got MambaModel\.$"),
        ],
    )
    def test_classes(self, kind, options, message):
        config = getattr(transformers, f"{kind}Config")(
            **(SIZES if kind != "XLNet" else {"vocab_size": 64}), **options
        )
        with pytest.raises(ValueError, match=message):
            huggingface.use(getattr(transformers, f"{kind}Model")(config), None)

    @pytest.mark.parametrize(
        ("name", "options"),
        [("Mpt", {"attn_config": {"clip_qkv": 2.0}}), ("IBert", {"quant_mode": True})],
    )
    def test_options(self, name, options):
        model = tiny(name, **options)
        huggingface.use(model, None, base="isentropic")
        expected = outputs(model, batch())
        with pytest.raises(
            ValueError, match=r"`model` must not have `(clip_qkv|quant_mode)` while it has a law"
        ):
            huggingface.use(model, laws.LogLength(4))
        assert torch.equal(outputs(model, batch()), expected)

    def test_every_class_exists(self):
        """A class that transformers renames would silently be without laws."""
        import pkgutil

        files = {
            name.rpartition(".modeling_")[2]: name
            for package in pkgutil.iter_modules(transformers.models.__path__)
            for _, name, _ in pkgutil.iter_modules(
                [f"{transformers.models.__path__[0]}/{package.name}"],
                f"transformers.models.{package.name}.",
            )
            if ".modeling_" in name
        }
        for name, family in _modules.FAMILIES.items():
            file, _, kind = name.partition(".")
            module = getattr(importlib.import_module(files[file]), kind)
            if _modules.looks_up_attention(module):  # in this version of transformers
                continue
            accepted = inspect.unwrap(module.forward).__code__.co_varnames
            assert family.mask in (*accepted, "attention_mask")


class TestSaved:
    @pytest.mark.parametrize("name", ["MPNet", "DebertaV2", "Bloom", "GPTJ", "Falcon, grouped"])
    def test_every_way(self, tmp_path, name):
        model = tiny(name)
        standard = outputs(model, batch("right"))
        huggingface.use(model, laws.AffineLog(0.0, 1.0), trainable="head")
        close(outputs(model, batch("right")), standard)
        parameters = [p for key, p in model.named_parameters() if "isentropic_law" in key]
        with torch.no_grad():
            for p in parameters:
                p += torch.linspace(0.1, 0.4, HEADS)
        expected = outputs(model, batch("right"))
        assert (expected - standard).abs().max() > 1e-3
        model.save_pretrained(tmp_path)
        torch.save(model, tmp_path / "model.pt")
        copies = [
            type(model).from_pretrained(tmp_path).eval(),
            torch.load(tmp_path / "model.pt", weights_only=False),
            copy.deepcopy(model),
        ]
        for other in copies:
            assert torch.equal(outputs(other, batch("right")), expected)
        model(**batch("right"))[0].square().mean().backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in parameters)
