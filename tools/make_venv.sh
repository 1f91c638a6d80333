#!/bin/sh
# Make a virtual environment with a Python that sar runs on; say what is missing where that fails.
# Usage: [PYTHON=interpreter] sh tools/make_venv.sh DIRECTORY
set -eu

directory=$1

version() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

suits() {
    case $(version "$1") in
        3.1[0-3]) ;;
        *) return 1 ;;
    esac
}

python=
for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.10 python3.13}; do
    if suits "$candidate"; then
        python=$candidate
        break
    fi
done

if [ -z "$python" ]; then
    asked=${PYTHON:-python3}
    found=$(version "$asked" || true)
    echo "$asked is ${found:+Python }${found:-not there}, but sar needs Python 3.10 to 3.13, and DGL 3.12 at" \
        "most: install one of them (on Debian or Ubuntu: sudo apt install python3 python3-venv), or name it with" \
        "PYTHON=/path/to/python." >&2
    exit 1
fi

if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    package=$(basename "$python")-venv
    echo "$python cannot make virtual environments: on Debian or Ubuntu, run: sudo apt install $package" >&2
    exit 1
fi

"$python" -m venv --clear "$directory"
