#!/bin/sh
# Makes the virtual environment DIR from PYTHON, after a look at what the build in it needs: CPython >= 3.10 with its
# venv module and headers, and a C compiler. A missing package is named; root on a system with apt-get gets it installed.
#   [VENV_FLAGS=--system-site-packages] venv.sh PYTHON DIR
set -eu
python=$1
dir=$2

die() {
    printf 'flodl_fast: %s\n' "$@" >&2
    exit 1
}

# Sets `missing` to a line for people and `packages` to the Debian packages that would mend it.
look() {
    missing=""
    packages=""
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        lacks "the venv module of $python" "$versioned-venv" "python3" "brew install python"
    "$python" -c 'import os, sysconfig; open(os.path.join(sysconfig.get_path("include"), "Python.h")).close()' 2>/dev/null ||
        lacks "Python.h, the headers of $python" "$versioned-dev" "python3-devel" "brew install python"
    command -v "${CC:-cc}" >/dev/null ||
        lacks "a C compiler (${CC:-cc})" "gcc" "gcc" "xcode-select --install"
    # The compiler alone is not enough on Debian: the C library's headers are a package of their own.
    if command -v "${CC:-cc}" >/dev/null && ! echo '#include <stdlib.h>' | ${CC:-cc} -E - >/dev/null 2>&1; then
        lacks "stdlib.h, the headers of the C library" "libc6-dev" "glibc-devel" "xcode-select --install"
    fi
}

lacks() { # WHAT DEBIAN FEDORA MACOS
    missing="$missing
  $1: Debian, Ubuntu: apt-get install $2; Fedora: dnf install $3; macOS: $4"
    packages="$packages $2"
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10) or sys.implementation.name != "cpython")' 2>/dev/null ||
    die "$python is not CPython 3.10 or newer; name one that is: make PYTHON=python3.12 …"

if [ -e "$dir" ]; then
    abi='import sysconfig; print(sysconfig.get_config_var("SOABI"))'
    if [ "$("$dir/bin/python" -c "$abi" 2>/dev/null)" = "$("$python" -c "$abi")" ] &&
        "$dir/bin/python" -m pip --version >/dev/null 2>&1; then
        exit 0
    fi
    die "$dir is broken or belongs to another Python than $python:" \
        "remove it (rm -rf $dir) or name another (make VENV=other …)"
fi

versioned=python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
look
if [ -n "$missing" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "flodl_fast: installing what the build lacks:$packages" >&2
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >&2 || true
    look
fi
[ -z "$missing" ] || die "the build needs what this machine does not have:$missing"
"$python" -m venv ${VENV_FLAGS:-} "$dir"
"$dir/bin/python" -m pip install --quiet --upgrade pip
