"""Time several forms of one computation in turns, so that all meet the same noise."""
from time import perf_counter


def rounds(forms: dict, count: int) -> dict[str, list[float]]:
    """Seconds of each form in each round, the forms taking turns."""
    seconds = {name: [] for name in forms}
    for n in range(count + 1):
        for name, form in forms.items():
            start = perf_counter()
            form()
            if n:                         # the first round warms up
                seconds[name].append(perf_counter() - start)
    return seconds
