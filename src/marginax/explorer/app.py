"""The explorer's page: widgets on the left, four pictures on the right, redrawn at every move (Panel and Bokeh)."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np
import panel as pn
from bokeh.events import Tap
from bokeh.models import ColumnDataSource, HoverTool
from bokeh.models.annotations import ColorBar
from bokeh.models.mappers import LinearColorMapper
from bokeh.plotting import figure

from marginax.explorer.numbers import PROBLEMS, Setting, World, frontier, learning_curves, look, world
from marginax.report import operator_style

MAPS = {
    "TD weights": ("weights", "w(x | start)"),
    "credit D": ("credit", "D(x | start)"),
    "values V": ("values", "V(x)"),
    "local rates": ("rates", "η(x)"),
}
_SIZES = {"chain": (10, 2, 60), "open-world": (10, 2, 16), "garnet": (30, 4, 200)}
_CURVES = {"retrace": "Retrace, over c̄", "marginalized": "marginalized, over c̄", "fastest": "fastest weights"}
_LEAST, _MOST = 1e-4, 1e9  # standard deviations that are drawn
_STYLES = {"one-step": "one-step", "Retrace": "retrace", "marginalized": "marginalized"}


class Explorer:
    """One person's page: what they chose, and the pictures of it.

    Args:
        problem: shown first: a name of `PROBLEMS`, or the path of an `.npz` file.
    """

    def __init__(self, problem: str = "open-world") -> None:
        choices = list(PROBLEMS) if problem in PROBLEMS else [*PROBLEMS, problem]
        self.problem: Any = pn.widgets.Select(name="problem", options=choices, value=problem)
        self.size: Any = pn.widgets.IntSlider(name="size", value=10, start=2, end=16)
        self.discount: Any = pn.widgets.FloatSlider(
            name="γ, discount", value=0.99, start=0.5, end=0.995, step=0.005
        )
        self.towards: Any = pn.widgets.FloatSlider(
            name="β, turn π towards μ", value=0.0, start=0.0, end=1.0, step=0.05
        )
        self.decay: Any = pn.widgets.FloatSlider(
            name="λ, decay of traces", value=1.0, start=0.0, end=1.0, step=0.05
        )
        self.clip: Any = pn.widgets.DiscreteSlider(
            name="c̄, clip of traces",
            options=[0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0],
            value=2.0,
        )
        self.action: Any = pn.widgets.Select(name="first action", options=["right"])
        self.shown: Any = pn.widgets.RadioButtonGroup(options=list(MAPS), value="TD weights")
        self.run = pn.widgets.Button(name="Learn with ten seeds", button_type="primary")
        self.summary = pn.pane.Markdown("", width=300)
        self.state = 0
        self._generation = 0  # a new move makes running learning curves stop
        self._world: World
        self._cells = ColumnDataSource({"x": [], "y": [], "value": [], "state": []})
        self._start = ColumnDataSource({"x": [], "y": []})
        self._colours = LinearColorMapper(palette="Viridis256")
        self._curve_data = {name: ColumnDataSource({"x": [], "y": []}) for name in _CURVES}
        self._now = {name: ColumnDataSource({"x": [], "y": []}) for name in ("Retrace", "marginalized")}
        columns: dict[str, Any] = {"x": [], "mean": [], "low": [], "high": []}
        self._learning = {name: ColumnDataSource(dict(columns)) for name in _STYLES}
        self._map: Any = self._draw_map()
        self._trade_off = self._draw_trade_off()
        self._curves = self._draw_curves()
        self.problem.param.watch(self._choose_problem, "value")
        for slider in (self.size, self.discount):
            slider.param.watch(self._build, "value_throttled")
        for widget in (self.towards, self.decay, self.clip, self.action, self.shown):
            widget.param.watch(self._move, "value")
        self.run.on_click(self._learn)
        self._choose_problem()

    def page(self) -> pn.viewable.Viewable:
        """The page."""
        controls = pn.Column(
            "## marginax explorer",
            self.problem,
            self.size,
            self.discount,
            self.towards,
            self.decay,
            self.clip,
            self.action,
            self.run,
            self.summary,
            width=320,
        )
        maps = pn.Column(self.shown, pn.pane.Bokeh(self._map), "Click a state to start there.")
        plots = pn.Column(pn.pane.Bokeh(self._trade_off), pn.pane.Bokeh(self._curves))
        return pn.Row(controls, pn.FlexBox(maps, plots))

    def setting(self) -> Setting:
        """What the widgets say."""
        return Setting(
            towards=self.towards.value,
            decay=self.decay.value,
            clip=self.clip.value,
            state=self.state,
            action=self._world.actions.index(self.action.value),
        )

    def _choose_problem(self, *_: Any) -> None:
        bounds = _SIZES.get(self.problem.value)
        self.size.visible = bounds is not None
        if bounds is not None:
            value, self.size.start, self.size.end = bounds
            self.size.value = value
        self._build()

    def _build(self, *_: Any) -> None:
        self._world = world(self.problem.value, self.size.value, discount=self.discount.value)
        own = f", {self._world.mdp.discount:g} in the file" if self._world.own_discount else ""
        self.discount.param.update(name=f"γ, discount{own}", disabled=bool(own), show_value=not own)
        self.state = int(np.argmax(self._world.mdp.initial))
        states = np.arange(self._world.mdp.num_states)
        rows, columns = np.divmod(states, self._world.columns)
        self._cells.data = {"x": columns, "y": -rows, "value": np.zeros(len(states)), "state": states}
        self._map.x_range.start, self._map.x_range.end = -0.6, self._world.columns - 0.4
        self._map.y_range.start, self._map.y_range.end = -rows.max() - 0.6, 0.6
        self._map.height = int(np.clip(470 * (rows.max() + 1) / self._world.columns, 160, 470))
        self._map.title.text = self._world.title
        best = int(np.argmax(self._world.pi[self.state]))
        self.action.param.update(options=list(self._world.actions), value=self._world.actions[best])
        self._move()

    def _move(self, *_: Any) -> None:
        """Redraws everything for the current setting."""
        self._generation += 1
        setting = self.setting()
        picture = look(self._world, setting)
        field, label = MAPS[self.shown.value]
        values = getattr(picture, field)
        self._cells.patch({"value": [(slice(None), values)]})
        self._colours.low, self._colours.high = float(min(values.min(), 0.0)), float(max(values.max(), 1e-9))
        self._map.right[0].title = label
        row, column = divmod(self.state, self._world.columns)
        self._start.data = {"x": [column], "y": [-row]}
        found = frontier(self._world, setting)
        for name, source in self._curve_data.items():
            curve = getattr(found, name)
            curve = curve[(curve[:, 1] > _LEAST) & (curve[:, 1] < _MOST)]
            source.data = {"x": curve[:, 0], "y": curve[:, 1]}
        for name, point in self._now.items():
            rate, deviation = picture.operators[name][1:]
            keep = _LEAST < deviation < _MOST
            point.data = {"x": [rate] if keep else [], "y": [deviation] if keep else []}
        for empty in self._learning.values():
            empty.data = {"x": [], "mean": [], "low": [], "high": []}
        self.summary.object = _summary(picture)

    def _tap(self, event: Any) -> None:
        column, row = round(event.x), round(-event.y)
        state = row * self._world.columns + column
        if 0 <= column < self._world.columns and 0 <= state < self._world.mdp.num_states:
            self.state = state
            self._move()

    def _learn(self, *_: Any) -> None:
        self._generation += 1
        mine, here, setting = self._generation, self._world, self.setting()
        document = pn.state.curdoc

        def show(errors: dict[str, np.ndarray]) -> None:
            if mine != self._generation:
                return
            for name, values in errors.items():
                mean, half = values.mean(axis=0), 1.96 * values.std(axis=0, ddof=1) / np.sqrt(len(values))
                x = np.arange(1, values.shape[1] + 1)
                self._learning[name].data = {
                    "x": x,
                    "mean": mean,
                    "low": np.maximum(mean - half, 1e-6),
                    "high": mean + half,
                }

        def work() -> None:
            for errors in learning_curves(here, setting):
                if mine != self._generation:
                    return
                if document is None:
                    show(errors)
                else:
                    document.add_next_tick_callback(partial(show, errors))

        threading.Thread(target=work, daemon=True).start()

    def _draw_map(self) -> Any:
        plot: Any = figure(width=520, height=470, tools="", toolbar_location=None, title="")
        plot.axis.visible = plot.grid.visible = False
        plot.title.text_font_size = "14px"
        cells = plot.rect(
            "x",
            "y",
            0.96,
            0.96,
            source=self._cells,
            fill_color={"field": "value", "transform": self._colours},
            line_color=None,
        )
        plot.scatter("x", "y", source=self._start, marker="star", size=18, color="white", line_color="black")
        plot.add_layout(ColorBar(color_mapper=self._colours, title="w"), "right")
        plot.add_tools(
            HoverTool(renderers=[cells], tooltips=[("state", "@state"), ("value", "@value{0.0000}")])
        )
        plot.on_event(Tap, self._tap)
        return plot

    def _draw_trade_off(self) -> Any:
        plot: Any = figure(
            width=520,
            height=330,
            tools="pan,wheel_zoom,reset",
            y_axis_type="log",
            title="Rate against noise at the start pair",
            x_axis_label="local contraction rate (smaller is faster)",
            y_axis_label="standard deviation of a target",
        )
        for name, label in _CURVES.items():
            colour = "#009E73" if name == "fastest" else operator_style(name).colour
            plot.line("x", "y", source=self._curve_data[name], color=colour, legend_label=label, line_width=2)
            plot.scatter("x", "y", source=self._curve_data[name], color=colour, size=5)
        for name, source in self._now.items():
            colour = operator_style(_STYLES[name]).colour
            plot.scatter("x", "y", source=source, size=14, fill_alpha=0, line_color=colour, line_width=3)
        plot.legend.orientation, plot.legend.label_text_font_size = "horizontal", "11px"
        plot.legend.margin, plot.legend.location = 0, "left"
        plot.add_layout(plot.legend[0], "above")  # inside it would hide parts of the curves
        return plot

    def _draw_curves(self) -> Any:
        plot: Any = figure(
            width=520,
            height=300,
            tools="reset",
            y_axis_type="log",
            title="Learning from trajectories of μ, ten seeds (press the button)",
            x_axis_label="trajectories",
            y_axis_label="relative error of Q",
        )
        for name, source in self._learning.items():
            colour = operator_style(_STYLES[name]).colour
            plot.varea("x", "low", "high", source=source, fill_color=colour, fill_alpha=0.2)
            plot.line("x", "mean", source=source, color=colour, legend_label=name, line_width=2)
        plot.legend.location, plot.legend.label_text_font_size = "bottom_left", "11px"
        return plot


def _summary(picture: Any) -> str:
    rows = "\n".join(
        f"| {name} | {rate:.3f} | {local:.3f} | {deviation:.3g} |"
        for name, (rate, local, deviation) in picture.operators.items()
    )
    value = f"Q of the policy at the start pair, the fixed point of every operator: {picture.value:.4f}."
    return f"| | rate | local rate | deviation |\n|---|---|---|---|\n{rows}\n\n{value}"


def serve(problem: str, port: int, show: bool) -> None:
    """Serves the page on this machine until interrupted, and says where once the port is taken."""
    Explorer(problem)  # a mistake in the file is said here, not in the browser
    try:
        server = pn.serve(
            lambda: Explorer(problem).page(),
            port=port,
            address="127.0.0.1",
            show=show,
            start=False,
            verbose=False,
            title="marginax explorer",
            websocket_origin=[f"127.0.0.1:{port}", f"localhost:{port}"],
        )
    except OSError as error:
        raise OSError(f"the explorer cannot use port {port} (--port chooses another): {error}") from None
    print(f"the explorer is at http://127.0.0.1:{port} (Ctrl-C ends it)", flush=True)
    server.start()
    server.io_loop.start()
