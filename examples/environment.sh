#!/usr/bin/env bash
# Makes the Python environment that the examples and the tests run in, or finds it as it was left:
#
#     PY=$(bash examples/environment.sh test)            # or: megatron,plot   or nothing: the package alone
#
# The argument names extras of setup.cfg. Standard output is the path of the environment's Python and nothing else;
# all messages go to standard error. All extras share one environment: asking for more later installs the rest.
#
#     PYTHON       the interpreter to build on (default: python3, then python3.13 .. python3.10). If it has torch 2.11
#                  or newer, the environment uses that one; otherwise torch is installed.
#     BURST_VENV   where the environment is (default: .venv beside setup.cfg). One that was not made here is
#                  installed into, but never deleted.
#     BURST_TORCH  the requirement to install torch by (default: torch==2.13.0, and only if torch is missing)
set -efuo pipefail # f: the names of extras are not patterns

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
extras=${1:-}
venv=${BURST_VENV:-$repo/.venv}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
py=$venv/bin/python
stamp=$venv/burst-environment # what is installed; missing until an installation is complete
ours=$venv/burst-environment.made-here # only an environment that has this one may be deleted
default_torch="torch==2.13.0"

say() { echo "environment: $*" >&2; }
die() {
    say "$@"
    exit 1
}

# ---------------------------------------------------------------------------------------------------- what is there

# One line that tells interpreters apart; a virtual environment has that of the interpreter that it was made from.
interpreter_id() { "$1" -c 'import sys; print(sys.version.split()[0], sys.base_prefix)' 2>/dev/null; }

# The state that an installation depends on, extras aside. Fails if the environment has no working Python.
wanted_state() {
    "$py" - "$repo" "$venv" <<'PYTHON' 2>/dev/null
import hashlib, pathlib, sys

repo, venv = sys.argv[1:]
files = [pathlib.Path(repo, name).read_bytes() for name in ("setup.cfg", "pyproject.toml")]
interpreter = sys.version.split()[0] + " " + sys.base_prefix
print(interpreter, venv, repo, hashlib.sha256(b"\0".join(files)).hexdigest(), sep="|")
PYTHON
}

stamp_line() { sed -n "s/^$1 //p" "$stamp" 2>/dev/null || true; }

# The extras of both lists, sorted, comma between.
union() { printf '%s\n' "${1//,/ }" "${2//,/ }" | tr -s ' ' '\n' | sed '/^$/d' | LC_ALL=C sort -u | paste -sd, -; }

# Is the virtual environment one that was completed here, in this place, from this interpreter?
is_same_venv() {
    [ -s "$stamp" ] && [ "$(wanted_state | cut -d'|' -f1,2)" = "$(stamp_line state | cut -d'|' -f1,2)" ] || return 1
    [ -z "${PYTHON:-}" ] || [ "$(interpreter_id "$PYTHON")" = "$(interpreter_id "$py")" ]
}

# Is all that is asked for installed in it?
is_ready() {
    is_same_venv && [ "$(wanted_state)" = "$(stamp_line state)" ] || return 1
    [ "$(union "$(stamp_line extras)" "$extras")" = "$(stamp_line extras)" ] || return 1
    [ -z "${BURST_TORCH:-}" ] || [ "$BURST_TORCH" = "$(stamp_line torch)" ]
}

# ------------------------------------------------------------------------------------------------------------- steps

find_python() {
    local candidate newest
    if [ -n "${PYTHON:-}" ]; then
        "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
            die "PYTHON=$PYTHON is not a Python 3.10 or newer. Set PYTHON to one, or unset it."
        command -v "$PYTHON"
        return
    fi
    for newest in 13 99; do # one that has binary packages of everything is better than a newer one
        for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
            if "$candidate" -c "import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, $newest))"; then
                command -v "$candidate"
                return
            fi 2>/dev/null
        done
    done
    die "no Python 3.10 or newer was found. Install one (Debian, Ubuntu: apt install python3 python3-venv)," \
        "or set PYTHON."
}

# Is there a torch that is new enough, and does it load? Prints its version.
torch_version() {
    "$1" -c '
import re, sys, torch
print(torch.__version__)
sys.exit(tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 11))' 2>/dev/null
}

# run_logged "what for" command...: one line while it runs; its output only if it fails.
run_logged() {
    local what=$1 log=$venv/burst-environment.log started=$SECONDS clock="" status=0
    shift
    if [ -t 2 ]; then
        while kill -0 $$ 2>/dev/null; do # the clock is in the background, so that Ctrl-C reaches the command
            printf '\renvironment: %s ... %d s ' "$what" $((SECONDS - started)) >&2
            sleep 1
        done &
        clock=$!
    else
        say "$what ..."
    fi
    "$@" >"$log" 2>&1 </dev/null || status=$?
    if [ -n "$clock" ]; then
        kill "$clock" 2>/dev/null || true
        wait "$clock" 2>/dev/null || true
        printf '\r' >&2
    fi
    if [ "$status" -ne 0 ]; then
        say "$what FAILED after $((SECONDS - started)) s. What it said:"
        cat "$log" >&2
        exit 1
    fi
    say "$what: done in $((SECONDS - started)) s    "
}

make_venv() {
    local base found options=()
    if [ ! -e "$ours" ] && [ -n "$(ls -A "$venv" | grep -v '^burst-environment')" ]; then
        interpreter_id "$py" >/dev/null ||
            die "$venv was not made here, and has no working Python. Remove it, or set BURST_VENV to another place."
        return
    fi
    base=$(find_python)
    case $base in "$venv"/*) # it is activated, and about to be deleted
        base=$("$base" -c 'import sys; print(sys._base_executable)') ;;
    esac
    : >"$ours"
    rm -f "$stamp"
    find "$venv" -mindepth 1 -maxdepth 1 ! -name 'burst-environment*' -exec rm -rf {} +
    if [ -z "${BURST_TORCH:-}" ] && found=$(torch_version "$base"); then
        say "$base has torch $found, which will be used"
        options=(--system-site-packages)
    fi
    if ! "$base" -c 'import ensurepip, venv' 2>/dev/null; then
        die "$base cannot make virtual environments: it has no ensurepip. Install it (Debian, Ubuntu: apt install" \
            "python$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv)," \
            "or set PYTHON to another one."
    fi
    run_logged "making $venv with $base" "$base" -m venv ${options[@]+"${options[@]}"} "$venv"
    [ ${#options[@]} -eq 0 ] || lend_packages "$base"
}

# --system-site-packages shows the packages of the interpreter that lies under everything. If the chosen one is itself
# that of a virtual environment, add the packages of that one.
lend_packages() {
    "$1" - "$("$py" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" <<'PYTHON'
import pathlib, sys, sysconfig

if sys.prefix != sys.base_prefix:
    paths = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    pathlib.Path(sys.argv[1], "burst_lent_packages.pth").write_text("".join(f"{path}\n" for path in paths))
PYTHON
}

install() {
    local pip=("$py" -m pip install --disable-pip-version-check)
    # Compiling all modules takes longer than compiling those that are imported, when they first are.
    [ -n "${PYTHONDONTWRITEBYTECODE:-}" ] || pip+=(--no-compile)
    local all torch=${BURST_TORCH:-$(stamp_line torch)}
    all=$(union "$(stamp_line extras)" "$extras")
    if [ -n "${BURST_TORCH:-}" ] && [ "$BURST_TORCH" != "$(stamp_line torch)" ]; then
        run_logged "installing $BURST_TORCH" "${pip[@]}" "$BURST_TORCH"
    elif ! torch_version "$py" >/dev/null; then
        # First and by itself: the package only asks for a minimum, and would get whatever is newest.
        run_logged "installing ${torch:=$default_torch} (may be large)" "${pip[@]}" "$torch"
    fi
    run_logged "installing burst_plugin${all:+[$all]}" "${pip[@]}" -e "$repo${all:+[$all]}"
    printf 'state %s\nextras %s\ntorch %s\n' "$(wanted_state)" "$all" "$torch" >"$stamp.new"
    mv "$stamp.new" "$stamp"
}

# One at a time. The lock lies in the environment, so that two environments do not wait for each other.
lock() {
    local waited=0
    if command -v flock >/dev/null; then
        exec 9>"$venv/burst-environment.lock"
        flock -n 9 || {
            say "another run is installing into $venv; waiting for it"
            flock 9
        }
        return
    fi
    until mkdir "$venv/burst-environment.lock.d" 2>/dev/null; do
        [ "$waited" -ne 0 ] || say "another run is installing into $venv; waiting for it" \
            "(if there is none: rmdir $venv/burst-environment.lock.d)"
        [ "$((waited += 1))" -lt 1800 ] || die "gave up after 30 minutes."
        sleep 1
    done
    trap 'rmdir "$venv/burst-environment.lock.d"' EXIT
    trap 'exit 130' INT TERM
}

# -------------------------------------------------------------------------------------------------------------- main

known=$(sed -n '/^\[options\.extras_require\]/,/^\[/s/^\([a-z]*\) *=.*/\1/p' "$repo/setup.cfg")
for extra in ${extras//,/ }; do # pip would only warn
    grep -qx -e "$extra" <<<"$known" || die "setup.cfg has no extra $extra; it has" $known
done
if ! is_ready; then
    mkdir -p "$venv"
    lock
    if ! is_ready; then # it may have become so while this one waited
        is_same_venv || make_venv
        install
    fi
fi
echo "$py"
