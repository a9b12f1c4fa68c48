#!/usr/bin/env bash
# Adds burst attention to a Megatron-LM checkout, for those who do not start it with `python -m burst_plugin.run`:
#
#     bash patches/apply.sh TREE               # TREE: the directory that holds pretrain_gpt.py and megatron/
#     bash patches/apply.sh --reverse TREE     # takes it out again
#     bash patches/apply.sh --check TREE       # only says what it would do
#
# The patch is picked by the version that TREE gives itself, and fits the very file that it was made for: a tree that is
# of another version, has changes that are not committed, or is not what it says it is, is left as it is. Needs git.
# Exit status: 0 done, or nothing to do; 1 refused; 2 called wrongly.
set -euo pipefail
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE # of a repository that this happens to be called from

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
patches=$here/megatron-lm

usage() {
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}" >&2
    exit 2
}
refuse() {
    printf 'apply.sh: %s\n' "$@" "The tree was left as it is." >&2
    exit 1
}

# ------------------------------------------------------------------------------------------------ what a patch says

field() { sed -n "s/^$2: //p;/^diff /q" "$1"; }                             # field PATCH NAME: of its header
target() { sed -n 's|^diff --git a/.* b/||p' "$1"; }                         # the file that it changes
blob() { sed -n 's/^index \([0-9a-f]*\)\.\.\([0-9a-f]*\) .*/\'"$2"'/p' "$1"; } # 1: before it, 2: after it

known() {
    local patch
    for patch in "$patches"/*/*.patch; do
        printf '    %-14s megatron.core %s\n' "$(basename "$(dirname "$patch")")" "$(field "$patch" Versions)"
    done
}

pick() { # the patch for a version
    local patch
    for patch in "$patches"/*/*.patch; do
        case " $(field "$patch" Versions) " in *" $1 "*) echo "$patch" && return ;; esac
    done
}

# ----------------------------------------------------------------------------------------------- what the tree says

tree_version() {
    local info=$1/megatron/core/package_info.py
    [ -f "$info" ] || refuse "$1 is not a Megatron-LM checkout: it has no megatron/core/package_info.py."
    sed -n 's/^\(MAJOR\|MINOR\|PATCH\) = \([0-9]*\)$/\2/p' "$info" | paste -sd.
}

# Tracked files with changes that are not committed, one per line; nothing if the tree is not a repository of its own.
changes() {
    [ -e "$1/.git" ] || return 0
    git -C "$1" status --porcelain --untracked-files=no
}

# ------------------------------------------------------------------------------------------------------------- main

mode=apply
case ${1:-} in
--reverse | --check) mode=${1#--} && shift ;;
esac
[ $# -eq 1 ] && [[ $1 != -* ]] || usage
command -v git >/dev/null || refuse "git was not found: install it."
[ -d "$1" ] || refuse "$1 is not a directory."
tree=$(cd "$1" && pwd -P)

version=$(tree_version "$tree")
patch=$(pick "$version")
[ -n "$patch" ] || refuse "$tree is megatron.core ${version:-without a version}, for which there is no patch. There is for:" \
    "$(known)" "Check one of these out, or run the script with: python -m burst_plugin.run"
name=megatron-lm/$(basename "$(dirname "$patch")")/$(basename "$patch")
file=$(target "$patch")
found=$([ -f "$tree/$file" ] && git hash-object --no-filters "$tree/$file" || echo none)

# git apply ignores paths of a repository that merely lies around the tree, so it must not find that.
run_patch() { (cd "$tree" && GIT_CEILING_DIRECTORIES=$(dirname "$tree") git apply "$@" "$patch"); }

if [ "$found" = "$(blob "$patch" 2)" ]; then
    if [ "$mode" = reverse ]; then
        run_patch --reverse
        echo "apply.sh: took $name out of $tree"
    else
        echo "apply.sh: $tree has $name already; nothing to do"
    fi
elif [ "$mode" = reverse ]; then
    refuse "$tree does not have $name: $file is not what the patch makes of it."
else
    dirty=$(changes "$tree")
    [ -z "$dirty" ] || refuse "$tree has changes that are not committed. Commit or stash them first:" "$dirty"
    [ "$found" = "$(blob "$patch" 1)" ] || refuse \
        "$tree says that it is $version, but its $file is not the one of $(field "$patch" Base)." \
        "Add these two statements to its end by hand:" "$(sed -n 's/^+\([a-z].*\)/    \1/p' "$patch")"
    if [ "$mode" = check ]; then
        echo "apply.sh: $name fits $tree"
    else
        run_patch
        echo "apply.sh: applied $name to $tree; burst_plugin has to be installed where it runs"
    fi
fi
