"""The command line, in this process; the model is the real one."""

import json
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("click")

from click.testing import CliRunner

import isentropic as it
from isentropic import cli, laws


@pytest.fixture
def run():
    def call(*arguments):
        result = CliRunner().invoke(cli.main, [str(x) for x in arguments])
        if not isinstance(result.exception, SystemExit | None):
            raise result.exception
        return result

    return call


@pytest.mark.host
class TestLaws:
    def test_table(self, run):
        out = run("laws", "su", "qwen:length=100", "--lengths", "512,64").stdout.splitlines()
        assert out[0].split() == ["n", "64", "512"]
        assert out[1].split() == ["su", "0.6667", "1.0000"]
        assert out[2].split() == ["qwen:length=100", "1.0000", f"{np.log(512) / np.log(100):.4f}"]

    def test_the_length_at_which_a_factor_is_1_has_one_name(self, run):
        for name in ("su", "su-decoder", "qwen", "lumina", "entropy-abf"):
            table = run("laws", f"{name}:length=100", "--lengths", "100").stdout.splitlines()
            assert table[1].split() == [f"{name}:length=100", "1.0000"]

    def test_rules_of_a_configuration(self, run, tmp_path):
        config = {
            "model_type": "llama4_text", "num_hidden_layers": 9, "attn_temperature_tuning": True,
            "floor_scale": 8192, "attn_scale": 0.1, "no_rope_layers": [1, 0, 0, 1, 0, 1, 1, 1, 1],
        }  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(config))
        lengths = [8191, 8192, 131072]
        arguments = ("laws", "--check", tmp_path, "--lengths", ",".join(map(str, lengths)))
        head, n, factor = run(*arguments).stdout.splitlines()
        assert head == "llama-4: on products, layers 1–2, 4, n counts slots"
        assert n.split() == ["n", *map(str, lengths)]
        expected = [1.0, 1 + 0.1 * np.log(2), 1 + 0.1 * np.log(17)]
        np.testing.assert_allclose([float(x) for x in factor.split()[1:]], expected, atol=1e-6)
        (rule,) = json.loads(run(*arguments, "--json").stdout)["rules"]
        assert rule["layers"] == [1, 2, 4]
        np.testing.assert_allclose(rule["factors"], expected)
        other = tmp_path / "other.json"
        other.write_text('{"model_type": "llama"}')
        assert run("laws", "--check", other).stdout.startswith("no rule")
        assert "takes no names" in run("laws", "su", "--check", other).stderr
        other.write_text("{")
        assert str(other) in run("laws", "--check", other).stderr

    def test_json(self, run):
        data = json.loads(run("laws", "--json").stdout)
        assert data["lengths"] == [64, 512, 4096, 32768]
        assert data["factors"]["llama-4"] == [laws.preset("llama-4")(n) for n in data["lengths"]]
        assert "qwen" not in data["factors"]  # needs a length

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["none"], "none is not a folder; as a preset: `name` must be 'asentmax-constant'"),
            (["qwen"], "`parameters` must be those of 'qwen' (length), got none"),
            (["qwen:length"], "'length' of 'qwen:length' is not PARAMETER=NUMBER"),
            (["qwen:length=x"], "'length=x' of 'qwen:length=x' is not PARAMETER=NUMBER"),
            (["su:length=2,length=3"], "'su:length=2,length=3' has length twice"),
            (["a" * 300], "`name` must be 'asentmax-constant'"),
            ([""], "`name` must be 'asentmax-constant'"),
            (["su", "--lengths", "1,2"], "whole numbers from 2"),
            (["su", "--lengths", "9" * 400], "whole numbers from 2"),
            (["su", "--lengths", "a"], "whole numbers from 2"),
        ],
    )
    def test_errors(self, run, arguments, message):
        result = run("laws", *arguments)
        assert result.exit_code == 2
        assert message in result.stderr


@pytest.mark.host
class TestJL:
    def test_dimensions(self, run):
        data = json.loads(run("jl", 10_000, "--eps", 0.2, "--features", 5000, "--json").stdout)
        for method, k in data["dimensions"].items():
            assert k == it.jl.min_dim(10_000, eps=0.2, method=method, n_features=5000)
        assert list(data["dimensions"]) == ["exact", "haar", "dasgupta-gupta", "achlioptas", "chernoff"]
        assert data["entropy_criterion"] == it.theory.entropy_criterion_dim(10_000)
        table = run("jl", 10_000, "--eps", 0.2).stdout
        assert "2206  exact" in table
        assert "haar" not in table

    def test_errors(self, run):
        result = run("jl", 100, "--eps", -1)
        assert result.exit_code == 2
        assert "`eps` must be in (0, 1), got -1.0" in result.stderr


@pytest.mark.host
def test_command_is_a_module():
    program = [sys.executable, "-m", "isentropic"]
    out = subprocess.run([*program, "--version"], capture_output=True, text=True, check=True).stdout
    assert out == f"isentropic, version {it.__version__}\n"


@pytest.fixture(scope="module")
def model():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    minilm = pytest.importorskip("minilm", reason="safetensors or tokenizers is not installed")
    try:
        return minilm.model_folder()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def texts():
    import statistics
    import textwrap

    return [textwrap.__file__, statistics.__file__]


def save_model(folder, positions=2048, kind="Llama"):
    """A random model of two tokens, with its tokenizer, which has no token for padding."""
    import tokenizers
    import transformers

    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    sizes = {"vocab_size": 2, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    of_kind = getattr(transformers, f"{kind}Config"), getattr(transformers, f"{kind}Model")
    config = of_kind[0](**sizes, num_hidden_layers=1, max_position_embeddings=positions)
    of_kind[1](config).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)


def save_laws(own, folder, **options):
    """The configuration of a decoder with these laws, and no weights."""
    import transformers

    from isentropic.integrations import huggingface

    sizes = {"vocab_size": 2, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    model = transformers.LlamaModel(transformers.LlamaConfig(**sizes, num_hidden_layers=len(own)))
    huggingface.use(model, own, **options)
    model.config.save_pretrained(folder)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
class TestModel:
    @pytest.fixture(autouse=True)
    def _only_once(self, request):
        if request.config.getoption("--backend") not in (None, "torch"):
            pytest.skip("belongs to the backend torch")
        pytest.importorskip("transformers")

    @pytest.mark.usefixtures("model")  # skips where transformers is not installed
    def test_the_laws_of_a_folder(self, run, tmp_path):
        save_laws([laws.AffineLog(np.asarray([0.0, 1.0]), 1.0), None, laws.LogLength(8)], tmp_path)
        arguments = ("laws", tmp_path, "su", "--lengths", "8,64")
        rows = [line.rsplit(maxsplit=2) for line in run(*arguments).stdout.splitlines()[1:]]
        means = [[1 + np.log(8) / 2, 1 + np.log(64) / 2], [1, 1], [1, 2]]
        su = [laws.preset("su")(8), laws.preset("su")(64)]
        assert [name for name, *_ in rows] == [*(f"layers.{i}.self_attn" for i in range(3)), "su"]
        assert [[float(x) for x in row[1:]] for row in rows] == np.round([*means, su], 4).tolist()
        heads = json.loads(run(*arguments, "--json").stdout)["factors"]["layers.0.self_attn"]
        np.testing.assert_allclose(heads, [[1.0, 1 + np.log(8)], [1.0, 1 + np.log(64)]], rtol=1e-6)

    def test_the_laws_of_several_folders(self, run, tmp_path):
        pytest.importorskip("transformers")
        paths = [tmp_path / f"{base}" for base in (8, 64)]
        save_laws([laws.LogLength(8), None], paths[0])
        save_laws([laws.AffineLog(1 / np.log(64), 0.0), None], paths[1], trainable="head")
        rows = run("laws", *paths, "--lengths", "64").stdout.splitlines()[1:]
        assert [row.rsplit(maxsplit=1) for row in rows] == [
            [f"{path}: layers.{i}.self_attn", factor]
            for path, factors in zip(paths, (("2.0000", "1.0000"), ("1.0000", "1.0000")), strict=True)
            for i, factor in enumerate(factors)
        ]

    def test_folders_without_a_law_for_every_length(self, run, tmp_path):
        pytest.importorskip("transformers")
        save_laws([laws.Power(1000.0, 1)], tmp_path)
        for arguments in (["laws", tmp_path], ["laws", tmp_path, "--json"]):
            result = run(*arguments)
            assert result.exit_code == 1
            assert result.stderr == "Error: layers.0.self_attn has no finite factor for 64 keys\n"

    def test_the_laws_of_a_saved_model(self, run, model, tmp_path):
        import transformers

        from isentropic.integrations import huggingface

        network = transformers.BertModel.from_pretrained(model, num_hidden_layers=2)
        huggingface.use(network, {1: laws.LogLength(8)})
        network.save_pretrained(tmp_path)
        rows = run("laws", tmp_path, "--lengths", "8,64").stdout.splitlines()[1:]
        names = [f"encoder.layer.{i}.attention.self" for i in range(2)]
        assert [row.split() for row in rows] == [
            [names[0], "1.0000", "1.0000"], [names[1], "1.0000", "2.0000"],
        ]  # fmt: skip

    def test_laws_of_positions(self, run, model, texts, tmp_path):
        """The laws of a folder count what they count there."""
        import transformers
        from tiny_models import decoder

        from isentropic.integrations import huggingface

        network = decoder("Mistral", sliding_window=8)
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        network.resize_token_embeddings(len(tokenizer))
        for folder, law in {"plain": None, "with laws": laws.LogLength(4)}.items():
            huggingface.use(network, law, count="positions")
            network.save_pretrained(tmp_path / folder)
            tokenizer.save_pretrained(tmp_path / folder)

        def profiled(folder, *options):
            return json.loads(
                run("profile", tmp_path / folder, *texts, "--lengths", "32", "--json", *options).stdout
            )["entropy"]

        own, plain = profiled("with laws"), profiled("plain")
        np.testing.assert_allclose(profiled("plain", "--laws", tmp_path / "with laws"), own, rtol=1e-5)
        assert np.abs(np.subtract(own, plain)).max() > 0.01

    def test_observe(self, run, model, texts):
        def observed(*options):
            return json.loads(run("observe", model, *texts, "--length", 48, "--json", *options).stdout)

        standard, sharper = observed(), observed("--laws", "su:length=2")
        assert len(standard["layers"]) == 6
        profiled = json.loads(run("profile", model, *texts, "--lengths", "48", "--json").stdout)
        np.testing.assert_allclose(standard["entropy"], profiled["entropy"][0], rtol=1e-4)
        factor = np.log(48) / np.log(2)
        first = np.array(standard["largest_logit"][0]) * factor
        np.testing.assert_allclose(sharper["largest_logit"][0], first, rtol=1e-4)
        table = run("observe", model, *texts, "--length", 48).stdout.splitlines()
        assert table[2].split()[:2] == [standard["layers"][0], f"{np.mean(standard['entropy'][0]):.3f}"]

    def test_observe_sees_all_texts(self, run, model, texts, monkeypatch):
        def observed(*paths):
            out = run("observe", model, *paths, "--length", 48, "--json").stdout
            return np.asarray(json.loads(out)["entropy"])

        expected = observed(*texts)
        monkeypatch.setattr(cli, "_BATCH_TOKENS", 48)
        np.testing.assert_allclose(observed(*texts), expected, rtol=1e-5)
        assert abs(observed(texts[-1]) - expected).max() > 0.01

    def test_profile(self, run, model, texts, tmp_path):
        options = ["--lengths", "32,64", "--plot", tmp_path / "drift.png"]
        result = run("profile", model, *texts, *options, "--json")
        data = json.loads(result.stdout)
        np.testing.assert_allclose(data["lengths"], [32, 64])
        assert data["counts"] == [64, 128]
        assert np.shape(data["entropy"]) == (2, 6, 12)
        assert (tmp_path / "drift.png").read_bytes().startswith(b"\x89PNG")
        assert "entropies: 100%" in result.stderr  # the progress bar
        assert "2/2" in result.stderr
        table = run("profile", model, *texts, "--lengths", "32,64").stdout
        mean = np.mean(data["entropy"], axis=(1, 2))
        assert f"all layers{mean[0]:8.3f}{mean[1]:8.3f}" in table

    def test_calibrate(self, run, model, texts, tmp_path):
        options = ["--lengths", "32,64,128", "--reference-length", 64, "-o", tmp_path / "laws"]
        data = json.loads(run("calibrate", model, *texts, *options, "--json").stdout)
        drift = {name: np.abs(report["slope"]).mean() for name, report in data.items()}
        assert drift["calibrated"] < drift["standard"] / 3
        again = run(
            "profile",
            model,
            *texts,
            "--lengths",
            "32,64,128",
            "--laws",
            tmp_path / "laws",
            "--json",
        )
        np.testing.assert_allclose(
            json.loads(again.stdout)["entropy"], data["calibrated"]["entropy"], atol=1e-6
        )

    def test_decoder_without_a_token_for_padding(self, run, texts, tmp_path):
        save_model(tmp_path)
        out = run("profile", tmp_path, *texts, "--lengths", "33", "--json").stdout
        data = json.loads(out)
        # Queries see 2 … 33 keys, in groups of half octaves; the last of them begins at 26.9.
        assert sum(data["counts"]) == 2 * 32
        assert data["lengths"][-1] == pytest.approx(np.exp(np.log(np.arange(27, 34)).mean()))

    def test_lengths_by_default(self, run, texts, tmp_path):
        save_model(tmp_path, positions=128)
        data = json.loads(run("profile", tmp_path, *texts, "--json").stdout)
        # The model takes 128 tokens, so the lengths are 64 and 128. The first query of each text sees
        # one key, and does not count.
        assert sum(data["counts"]) == 2 * (63 + 127)

    def test_models_of_few_tokens_need_lengths(self, run, texts, tmp_path):
        save_model(tmp_path, positions=32)
        result = run("profile", tmp_path, *texts)
        assert result.exit_code == 2
        assert "--lengths: give some, as the model takes 32 tokens at most" in result.stderr
        assert run("profile", tmp_path, *texts, "--lengths", "16").exit_code == 0

    def test_positions_behind_the_padding(self, run, texts, tmp_path):
        save_model(tmp_path, positions=34, kind="Roberta")
        result = run("profile", tmp_path, *texts, "--lengths", "16,33")
        assert result.exit_code == 2
        assert "--lengths: the model takes 32 tokens at most" in result.stderr
        assert run("profile", tmp_path, *texts, "--lengths", "16,32").exit_code == 0

    def test_the_texts_are_the_same_at_all_lengths(self, run, model, texts, tmp_path):
        short = tmp_path / "short.txt"
        short.write_text("one and two and " * 20)  # 82 tokens
        lengths = ["--lengths", "32,64,128", "--json"]
        result = run("profile", model, *texts, short, *lengths)
        assert "texts: 2 of 3, 1 shorter than 128 tokens\n" in result.stderr
        alone = run("profile", model, *texts, *lengths)
        assert "texts: 2 of 2\n" in alone.stderr
        assert json.loads(result.stdout) == json.loads(alone.stdout)
        result = run("profile", model, *texts, short, short, "--lengths", "32,64", "--json")
        assert json.loads(result.stdout)["counts"] == [4 * 32, 4 * 64]

    def test_presets(self, run, model, texts, tmp_path):
        import transformers

        from isentropic.integrations import huggingface

        config = transformers.AutoConfig.from_pretrained(model)
        network = transformers.AutoModel.from_config(config)
        huggingface.use(network, laws.preset("su", length=128))
        network.config.save_pretrained(tmp_path / "laws")
        options = ["--lengths", "32", "--json"]
        outputs = [
            run("profile", model, texts[0], *options, *own).stdout
            for own in ([], ["--laws", "su:length=128"], ["--laws", tmp_path / "laws"])
        ]
        assert outputs[1] == outputs[2] != outputs[0]

    def test_titles(self, run, model, texts, tmp_path, monkeypatch):
        titles = []
        monkeypatch.setattr(cli, "_draw", lambda path, reports: titles.extend(reports))
        for own in ([], ["--laws", "su"]):
            run("profile", model, texts[0], "--lengths", "32", *own)
        assert titles == ["standard attention", "with laws"]

    def test_models_of_the_hub(self, run, model, texts, tmp_path, monkeypatch):
        import huggingface_hub
        import transformers

        asked, loaded = [], []

        def loader(kind):
            load = kind.from_pretrained

            def from_pretrained(name, **options):
                loaded.append((name, options["local_files_only"]))
                return load(model, **options)

            return from_pretrained

        for kind in (transformers.AutoTokenizer, transformers.AutoModel):
            monkeypatch.setattr(kind, "from_pretrained", loader(kind))

        def profile(error=None):
            def file_exists(name, file):
                asked.append((name, file))
                if error is not None:
                    raise error
                return True

            monkeypatch.setattr(huggingface_hub, "file_exists", file_exists)
            return run("profile", "some/model", texts[0], "--lengths", "32", "--json").stdout

        results = [profile(), profile(OSError("no route"))]
        assert asked == [("some/model", "config.json")] * 2
        assert loaded == [("some/model", False)] * 2 + [("some/model", True)] * 2
        assert (
            results[0]
            == results[1]
            == run("profile", model, texts[0], "--lengths", "32", "--json").stdout
        )
        assert len(asked) == 2  # nothing is asked about a folder

    def test_without_a_network(self, run, texts, monkeypatch):
        import huggingface_hub

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        result = run("profile", "some/model", texts[0])
        assert result.exit_code == 1
        (line,) = result.stderr.splitlines()
        assert line.startswith(
            "Error: some/model is not a folder, does not load from the cache, and the Hub cannot be reached: Cannot reach"
        )

    def test_outputs_are_tried_before_the_work(self, run, model, texts, tmp_path, monkeypatch):
        monkeypatch.setattr(cli, "_load_model_and_batches", None)  # the check comes before the work
        for option in (["-o", "/no/laws"], ["-o", tmp_path / "a", "--plot", "/no/a.png"]):
            result = run("calibrate", model, *texts, *option)
            assert result.exit_code == 1
            assert "cannot be written" in result.stderr
        result = run("profile", model, *texts, "--plot", tmp_path / "a.unknown")
        assert result.exit_code == 2
        assert "must end in one of" in result.stderr
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        result = run("profile", model, *texts, "--plot", tmp_path / "a.png")
        assert (
            "Error: isentropic.plots needs matplotlib (the extra 'plots'): pip install" in result.stderr
        )

    def test_errors(self, run, model, texts, tmp_path, monkeypatch):
        def refused(*arguments):
            result = run(*arguments)
            assert result.exit_code in (1, 2)
            return result.stderr

        nowhere = refused("profile", "/no/model", texts[0])
        assert "Error: /no/model is not a folder" in nowhere
        assert "Repo id must be in the form" in nowhere
        assert "File '/no/text' does not exist" in refused("profile", model, "/no/text")
        assert "Missing argument 'TEXT...'" in refused("profile", model)
        assert f"{tmp_path} does not contain a model that loads" in refused(
            "profile", tmp_path, texts[0]
        )
        assert "takes 512 tokens at most" in refused("profile", model, texts[0], "--lengths", "513")
        (tmp_path / "short.txt").write_text("few words")
        short = refused("profile", model, tmp_path / "short.txt", "--lengths", "3,64")
        assert "none of the texts has 64 tokens, the longest has 4: give shorter --lengths" in short
        (tmp_path / "shorter.txt").write_text("word")
        texts_too_short = tmp_path / "shorter.txt", tmp_path / "short.txt", tmp_path / "shorter.txt"
        assert "the longest has 4:" in refused("profile", model, *texts_too_short, "--lengths", "64")
        (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
        assert "binary is not a text in UTF-8" in refused("profile", model, tmp_path / "binary")
        wrong = refused("profile", model, texts[0], "--lengths", "32", "--laws", tmp_path)
        assert f"{tmp_path} does not contain a model that loads" in wrong
        monkeypatch.setattr(cli, "_load_model_and_batches", None)  # the check comes before the work
        for wrong, message in (
            ("laws.jsn", "--laws: laws.jsn is not a folder; as a preset: `name` must be"),
            ("qwen", "`parameters` must be those of 'qwen' (length), got none"),
            ("su:length", "'length' of 'su:length' is not PARAMETER=NUMBER"),
        ):
            assert message in refused("profile", model, texts[0], "--laws", wrong)
