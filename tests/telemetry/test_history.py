from mlcrouter_nb.telemetry.history import History


def line(history: History) -> list[tuple[float, dict[str, int]]]:
    return [(point.time, point.in_flight) for point in history.points()]


def test_a_point_per_half_second_with_the_peak_between():
    history = History()
    history.seen(10.0, "E0", 1)
    history.seen(10.1, "E0", 2)
    history.seen(10.2, "E0", 3)
    history.seen(10.3, "E0", 1)
    history.seen(10.6, "E0", 2)
    assert line(history) == [(10.0, {"E0": 1}), (10.6, {"E0": 3})]


def test_the_fall_to_nothing_is_drawn_at_once():
    history = History()
    history.seen(10.0, "E0", 1)
    history.seen(10.1, "E0", 0)
    assert line(history)[-1] == (10.1, {"E0": 0})


def test_short_requests_do_not_flood_it():
    history = History()
    for i in range(1000):
        history.seen(10 + i / 1000, "E0", 1)
        history.seen(10 + i / 1000, "E0", 0)
    assert len(history.points()) <= 6


def test_nothing_is_added_while_nothing_happens():
    history = History()
    history.seen(10.0, "E0", 1)
    history.seen(11.0, "E0", 0)
    before = line(history)
    for second in range(12, 20):
        history.look(second, {"E0": 0})
    assert line(history) == before


def test_running_requests_go_on_being_drawn_and_old_points_go():
    history = History()
    history.seen(10.0, "E0", 2)
    for tick in range(400):
        history.look(10 + tick / 4, {"E0": 2})
    points = history.points()
    assert 115 <= len(points) <= 125
    assert points[0].time >= 109.75 - 60
