"""Compiled code is found again by its sources, and made anew where it cannot be kept."""

import pytest

from sar.kernels import code_cache


def make():
    def loop():
        pass

    return loop


def keeps(**options):
    return lambda function: (function.__qualname__, options)


def cannot_keep(**options):
    if options.pop("cache", False):
        raise RuntimeError("no locator available")
    return keeps(**options)


@pytest.fixture(autouse=True)
def nothing_known():
    code_cache._digest.cache_clear()


def test_a_change_in_any_source_gives_the_code_another_name(tmp_path):
    folder, file = tmp_path / "folder", tmp_path / "more.py"
    (folder / "below").mkdir(parents=True)
    names = []
    for path, text in ((file, ""), (folder / "below" / "helper.py", "x = 1"), (file, "y = 2")):
        path.write_text(text)
        code_cache._digest.cache_clear()
        name, options = code_cache.compile_cached(make(), keeps, {"nogil": True}, folder, file)
        assert options == {"cache": True, "nogil": True}
        names.append(name)
    assert len(set(names)) == 3
    assert all(name.startswith("loop_") for name in names)
    assert code_cache.compile_cached(make(), keeps, {}, folder, file)[0] == names[-1]


def test_without_a_place_for_it(tmp_path):
    assert code_cache.compile_cached(make(), cannot_keep, {"nogil": True}, tmp_path)[1] == {"nogil": True}
