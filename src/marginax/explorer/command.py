"""`marginax explore`."""

from marginax import _checks as checks


def explore(problem: str = "open-world", /, *, port: int = 5006, browser: bool = True) -> None:
    """Opens a page where you turn the policies and the traces and see weights, rates, noise and learning at once.

    Needs no network. Stop it with Ctrl-C.

    Args:
        problem: chain, open-world, frozen-lake, garnet, or the path of an .npz file with p, r, pi and mu.
        port: port on this machine at which the page is served.
        browser: whether to open it in the browser.
    """
    from marginax.explorer.numbers import PROBLEMS

    if not 1 <= port <= 65535:
        raise ValueError(f"--port must lie between 1 and 65535, got {port}")
    try:
        from marginax.explorer import app
    except ImportError as error:
        missing = (error.name or "panel").split(".")[0]
        raise checks.missing_package("the explorer", missing, "explorer") from None
    if not problem.endswith(".npz"):
        checks.choice("PROBLEM", problem, (*PROBLEMS, "the path of an .npz file"))
    app.serve(problem, port, browser)
