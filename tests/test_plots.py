"""Pictures: that they show the numbers they are given."""

import matplotlib
import numpy as np
import pytest

import isentropic as it
from isentropic import plots
from isentropic.jl._distortion import DistortionReport

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def _close():
    import matplotlib.pyplot as plt

    yield
    plt.close("all")


class TestDistortion:
    def test_histogram_and_theory(self, backend, rng):
        errors = backend.array((rng.chisquare(100, size=5000) / 100 - 1).astype("float32"))
        report = DistortionReport(errors, errors, errors, errors, 200, 300, 100, 19900)
        ax = plots.distortion(report, bins=40)
        heights = np.asarray([patch.get_height() for patch in ax.patches])
        width = ax.patches[0].get_width()
        np.testing.assert_allclose((heights * width).sum(), 1, rtol=1e-6)
        e, density = ax.lines[0].get_data()
        area = np.sum((density[1:] + density[:-1]) / 2 * np.diff(e))
        np.testing.assert_allclose(area, 1, rtol=0.02)  # χ² within the limits of the picture
        assert ax.get_title() == "200 points, 300 → 100 dimensions"
        labels = [text.get_text() for text in ax.get_legend().get_texts()]
        assert labels[-1] == f"all within {it.jl.eps(200, 100):.2f} (99 %)"

    def test_given_axes(self, rng):
        import matplotlib.pyplot as plt

        _, ax = plt.subplots()
        x = rng.normal(size=(10, 5))
        assert plots.distortion(it.jl.distortion(x, x[:, :2]), ax=ax) is ax


def _report(*shape):
    entropy = np.random.default_rng(1).uniform(1, 3, size=shape)
    lengths = 2.0 ** np.arange(5, 5 + shape[0])
    return it.drift.DriftReport(lengths, np.full(shape[0], 10), entropy)


@pytest.mark.host
class TestEntropy:
    def test_lines(self):
        report = _report(4, 2, 3)
        ax = plots.entropy(
            {"a": report, "b": _report(3, 1, 2)}, curves={"half": lambda n: np.log(n) / 2}
        )
        lines = {line.get_label(): line.get_xydata() for line in ax.lines}
        expected = report.entropy.reshape(4, -1).mean(axis=1)
        np.testing.assert_allclose(lines["a"], np.stack([report.lengths, expected], axis=1))
        n, half = lines["half"].T
        np.testing.assert_allclose(half, np.log(n) / 2)
        assert (n[0], n[-1]) == pytest.approx((32, 256))
        assert "log n (uniform attention)" in lines
        assert len(ax.collections) == 2  # the bands
        (outline,) = ax.collections[0].get_paths()
        band = np.quantile(report.entropy.reshape(4, -1), (0.25, 0.75), axis=1)
        for x, ends in zip(report.lengths, band.T, strict=True):
            heights = np.unique(outline.vertices[outline.vertices[:, 0] == x, 1])
            np.testing.assert_allclose(heights, ends)

    def test_one_report_and_given_axes(self):
        import matplotlib.pyplot as plt

        _, ax = plt.subplots()
        assert plots.entropy(_report(1, 1, 1), ax=ax) is ax

    def test_errors(self):
        with pytest.raises(ValueError, match="`reports` must have one report or more"):
            plots.entropy({})
        with pytest.raises(TypeError, match=r"`reports\['a'\]` must be a DriftReport, got int"):
            plots.entropy({"a": 1})
        with pytest.raises(TypeError, match="`reports` must be a DriftReport or a mapping to them"):
            plots.entropy([1])


@pytest.mark.host
class TestDrift:
    def test_colors_are_slopes(self):
        report = _report(4, 2, 30)
        ax = plots.drift(report)
        (image,) = ax.images
        np.testing.assert_array_equal(image.get_array(), report.slope)
        assert image.get_clim() == (-1, 1)  # white is 0
        assert image.colorbar.extend == "neither"
        for slopes, extend in (([2.0, 0.0], "max"), ([-2.0, 0.0], "min"), ([-2.0, 2.0], "both")):
            entropy = np.log([64.0, 256.0])[:, None, None] * np.array(slopes)
            far = it.drift.DriftReport(np.array([64, 256]), np.array([1, 1]), entropy)
            assert plots.drift(far).images[0].colorbar.extend == extend
        with pytest.raises(TypeError, match="`report` must be a DriftReport, got list"):
            plots.drift([1])
        with pytest.raises(TypeError, match="`report` must be a DistortionReport, got list"):
            plots.distortion([1])


class TestAttention:
    def test_map_and_entropies(self, backend, rng):
        p = rng.dirichlet(np.ones(6), size=4).astype("float32")
        p[0] = np.eye(6)[1]
        ax = plots.attention(backend.array(p))
        np.testing.assert_array_equal(ax.images[0].get_array(), p)
        (side,) = ax.child_axes
        h, uniform = (line.get_xdata() for line in side.lines)
        np.testing.assert_allclose(h, it.entropy(p.astype(float)), atol=1e-6)
        np.testing.assert_allclose(uniform, [0, *[np.log(6)] * 3])

    @pytest.mark.host
    def test_errors(self, rng):
        with pytest.raises(ValueError, match="`weights` must have 2 dimensions"):
            plots.attention(rng.random((2, 3, 3)))


@pytest.mark.host
def test_errors_name_the_argument():
    with pytest.raises(TypeError, match="`weights` must be an array"):
        plots.attention([[1.0, 0.0]])
