"""Pictures: that they show the numbers they are given."""

import matplotlib
import numpy as np
import pytest

import isentropic as it
from isentropic import plots

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def _close():
    import matplotlib.pyplot as plt

    yield
    plt.close("all")


class TestDistortion:
    def test_histogram_and_theory(self, backend, rng):
        errors = backend.array((rng.chisquare(100, size=5000) / 100 - 1).astype("float32"))
        report = it.DistortionReport(errors, errors, errors, errors, 200, 300, 100, 19900)
        ax = plots.distortion(report, bins=40)
        heights = np.asarray([patch.get_height() for patch in ax.patches])
        width = ax.patches[0].get_width()
        np.testing.assert_allclose((heights * width).sum(), 1, rtol=1e-6)
        e, density = ax.lines[0].get_data()
        area = np.sum((density[1:] + density[:-1]) / 2 * np.diff(e))
        np.testing.assert_allclose(area, 1, rtol=0.02)  # χ² within the limits of the picture
        assert ax.get_title() == "200 points, 300 → 100 dimensions"
        labels = [text.get_text() for text in ax.get_legend().get_texts()]
        assert labels[-1] == f"all within {it.jl_distortion(200, 100):.2f} (99 %)"

    def test_given_axes(self, rng):
        import matplotlib.pyplot as plt

        _, ax = plt.subplots()
        x = rng.normal(size=(10, 5))
        assert plots.distortion(it.distortion(x, x[:, :2]), ax=ax) is ax
