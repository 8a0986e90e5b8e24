#!/usr/bin/env bash
# Publish the student build to a repository of its own: `make publish REPOSITORY=git@github.com:SCHOOL/COURSE.git OUT=`.
# `publish.sh --check REPOSITORY` only says whether that can be published to.
# Students open it in a Codespace, its exercises on Colab (COLAB.md has the addresses), or clone it.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-build/student} repository=${2:-}
fail() { echo "error: $1" >&2; exit 1; }
[ -n "$repository" ] || fail "name the students' repository: make publish REPOSITORY=git@github.com:SCHOOL/COURSE.git"
if git remote -v | awk '{ print $2 }' | grep -qxF "$repository"; then
  fail "REPOSITORY=$repository is that of this repository, which has the solutions; name another one"
fi
[ "$out" != --check ] || exit 0 # before anything is built
[ -f "$out/.student-build.json" ] || fail "OUT=$out is no student build; run make student first"
case $repository in
  *github.com[:/]*) name=$(echo "${repository%.git}" | sed 's|.*github.com[:/]||') ;;
  *) name=SCHOOL/COURSE ;;
esac
{
  printf '# The exercises on Colab\n\nNothing needs to be installed. / 不必安裝任何東西。\n\n'
  for path in "$out"/exercises/colab/*.ipynb "$out"/exercises/colab/zh_TW/*.ipynb; do
    [ -f "$path" ] || continue
    place=${path#"$out"/}
    printf -- '- [%s](https://colab.research.google.com/github/%s/blob/main/%s)\n' "${place#exercises/colab/}" "$name" "$place"
  done
} > "$out/COLAB.md"
[ -d "$out/.git" ] || git -C "$out" init --quiet --initial-branch main
git -C "$out" add --all
git -C "$out" -c user.name="${GIT_AUTHOR_NAME:-course}" -c user.email="${GIT_AUTHOR_EMAIL:-course@localhost}" \
  commit --quiet --allow-empty --message "The course for students"
git -C "$out" push --quiet "$repository" HEAD:main
echo "$repository: the student build, without solutions; Colab's addresses are in COLAB.md there"
