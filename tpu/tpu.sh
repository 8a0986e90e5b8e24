#!/usr/bin/env bash
# Rent a TPU VM, run a recipe on all its workers, bring the run home, give the VM back.
#
#   tpu/tpu.sh --dry-run recipes/qwen3-1.7b-gsm8k-smoke.yaml     the whole session as commands; nothing is run
#   tpu/tpu.sh --help                                            the subcommands; each has a --help of its own
#
# It needs bash and gcloud. What it does on the VM is in on_vm.sh, what it says of errors in remedies.tsv.
set -euo pipefail
CALLER=$PWD
cd "$(dirname "$0")/.."
umask 077

SECRETS='HF_TOKEN|WANDB_API_KEY'
FOLDER=grpo      # the clone, in the home folder of every worker
KEPT=.cache/tpu  # what this program remembers: which TPU is where
POLL=${GRPO_TPU_POLL:-20}       # seconds between looks at a queued resource
PATIENCE=${GRPO_TPU_TIMEOUT:-90} # seconds for a worker to answer a short command
INSTALL_SECONDS=3600 PROVISION_MINUTES=30

NAME=${GRPO_TPU_NAME:-grpo} PROJECT=${GRPO_TPU_PROJECT:-} ZONES=${GRPO_TPU_ZONES:-} LOOK_IN=''
ACCELERATOR='' RUNTIME='' PRICING=spot FALLBACK=1 WAIT=15 VALID=''
REPOSITORY='' COMMIT='' BUNDLE='' ALLOW_DIRTY='' WORKER=0 FOLLOW='' OVERWRITE='' ALL='' YES=''
DRY='' SESSION='' ON_VM='' RECIPE='' WORDS=() ZONE='' CHILD='' QUEUED='' SECRET_FILE=''

fail() { echo "error: $*" >&2; exit 2; }
say() { if [ "$DRY" ]; then echo "# $*"; else echo "$*"; fi; }

usage() {
  case ${1:-} in
    create) cat << 'END' ;;
usage: tpu/tpu.sh create RECIPE [--spot | --on-demand] [--no-fallback] [--zones A,B,C] [--wait MINUTES] …

Ask for a TPU VM as a queued resource, zone after zone, until one is ACTIVE. Where there is no capacity, or none within
--wait, the next zone is tried, and after the last zone the other pricing. Any other error ends it, with its remedy.

  --accelerator v6e-8     default: hardware.accelerator of the recipe (a profile too: FILE.yaml@PROFILE)
  --zones A,B,C           tried in this order; default: zones that offer this generation
  --spot, --on-demand     what is asked for first; default: --spot
  --no-fallback           do not go on to the other pricing
  --wait MINUTES          per attempt, default 15; a request that was not met by then expires at Google's too
  --valid-until-duration  another expiry than --wait, such as 6h
  --runtime-version NAME  another VM image than the one for this generation
END
    bootstrap) cat << 'END' ;;
usage: tpu/tpu.sh bootstrap [--repository URL] [--commit SHA] [--bundle] [--allow-dirty]

On all workers: clone this repository at a commit, bring the secrets, install requirements/tpu.lock, count the chips.
It can be given again, for another commit or other secrets.

  --repository URL   default: this clone's origin
  --commit SHA       default: this clone's HEAD, which must be pushed
  --bundle           send the commit as a file: for a repository that the VM cannot read, or a commit that is not pushed
                     (always done when the origin is a folder of this machine)
  --allow-dirty      although tracked files differ from the commit; the differences do not travel

Secrets are HF_TOKEN and WANDB_API_KEY of the environment, as far as they are set. They travel in a file of mode 600 that
is removed here afterwards, are never on a command line and never printed; what arrives is checked by its length.
END
    run) cat << 'END' ;;
usage: tpu/tpu.sh run RECIPE [KEY=VALUE…] [--overwrite] [--run RUN]

Start `grpo train RECIPE …` on all workers. It goes on when the connection ends. Refused while a run is going on.
  --overwrite, --run RUN    as for grpo train; without --overwrite a run that was interrupted goes on
END
    status) cat << 'END' ;;
usage: tpu/tpu.sh status

The state of the TPU, and for each worker: running, finished or failed with its exit code, and the last line of its log.
A worker that does not answer is named. Known errors in a log are followed by their remedy.
END
    logs) cat << 'END' ;;
usage: tpu/tpu.sh logs [-f] [--worker N]

The end of a worker's log; -f goes on until Ctrl-C. Default: worker 0.
END
    fetch) cat << 'END' ;;
usage: tpu/tpu.sh fetch [RUN] [--all] [--overwrite] [--worker N]

Bring a run to runs/ here: report, evaluations, metrics, recipe, log; default: the run that was started last.
  --all         checkpoints and the exported model too (gigabytes)
  --overwrite   replace a runs/RUN that is here already; without it nothing is touched
END
    stop) cat << 'END' ;;
usage: tpu/tpu.sh stop

End the run on all workers: SIGTERM, and SIGKILL for what is still there 30 s later. The VM stays, and is billed.
END
    delete) cat << 'END' ;;
usage: tpu/tpu.sh delete [--yes]

Give the TPU back, with its disk: what was not fetched is gone. Asks first, unless --yes. Also withdraws a request that
is still waiting.
END
    *) cat << 'END' ;;
usage: tpu/tpu.sh COMMAND [options]        tpu/tpu.sh COMMAND --help
       tpu/tpu.sh --dry-run RECIPE [KEY=VALUE…]     the whole session as commands

  create RECIPE             ask for a TPU VM until there is one
  bootstrap                 clone, secrets and the locked packages on all workers
  run RECIPE [KEY=VALUE…]   start training
  status                    what the TPU and every worker are doing
  logs [-f]                 the end of the log
  fetch [RUN]               bring the run to runs/ here
  stop                      end the run, keep the VM
  delete                    give the VM back
  session RECIPE            the same as --dry-run RECIPE
  remedies                  the errors that people meet, and what helps
  remedy                    read text from stdin, and say the remedy of the first error known

  --dry-run                 with any command: print what would be run, and run nothing
  --name NAME               of the TPU, default grpo                          (or GRPO_TPU_NAME)
  --project PROJECT         default: the one that gcloud is configured with   (or GRPO_TPU_PROJECT)
  --zones A,B,C             where to ask, and where to look                   (or GRPO_TPU_ZONES)
END
  esac
}

# --- What a recipe and a slice's name say ---------------------------------------------------------------------

recipe_file() { # FILE.yaml of FILE.yaml@PROFILE, from the repository's folder
  local file=${1%%@*}
  case $file in "$PWD"/*) file=${file#"$PWD"/} ;; esac
  [ -f "$file" ] || case $CALLER/$file in "$PWD"/*) file=$CALLER/$file file=${file#"$PWD"/} ;; esac
  [ -f "$file" ] || fail "recipe ${1%%@*} does not exist; recipes here: $(echo recipes/*.yaml)"
  echo "$file"
}

accelerator_of() { # accelerator_of FILE.yaml[@PROFILE,…] [KEY=VALUE…]: hardware.accelerator, without a YAML parser
  local file profiles='' word found
  file=$(recipe_file "$1") || exit 2
  case $1 in *@*) profiles=${1#*@} ;; esac
  found=$(awk -v wanted="$profiles" '
    { sub(/[ \t]#.*$/, "") }                                   # comments
    /^[^ \t#]/ { top = $1; sub(/:.*/, "", top); sub_name = "" }
    top == "profiles" && /^  [^ \t#]/ { sub_name = $1; sub(/:.*/, "", sub_name) }
    match($0, /accelerator:[ \t]*[^ \t,}]+/) {
      value = substr($0, RSTART, RLENGTH); sub(/accelerator:[ \t]*/, "", value); gsub(/["\047]/, "", value)
      if (top == "hardware") base = value; else if (top == "profiles") of[sub_name] = value
    }
    END { n = split(wanted, names, ","); for (i = 1; i <= n; i++) if (names[i] in of) base = of[names[i]]; print base }
  ' "$file")
  for word in "${@:2}"; do case $word in hardware.accelerator=*) found=${word#*=} ;; esac; done
  [ "$found" != null ] || found=''
  echo "$found"
}

run_of() { # run_of FILE.yaml[@PROFILE,…] [--run RUN]…: the name that grpo train gives the run directory
  local file name word previous='' profiles=''
  file=$(recipe_file "$1") || exit 2
  case $1 in *@*) profiles=-${1#*@} ;; esac
  name=$(awk '/^name:/ { sub(/[ \t]#.*$/, ""); gsub(/["\047]/, "", $2); print $2; exit }' "$file")${profiles//,/-}
  for word in "${@:2}"; do
    case $word in name=*) name=${word#*=} ;; esac
    [ "$previous" != --run ] || name=$word
    previous=$word
  done
  echo "$name"
}

# Accelerator types, images and zones: cloud.google.com/tpu/docs/v5e (v5litepod), …/tpu/docs/runtimes and
# …/tpu/docs/regions-zones, as of 2025. --accelerator, --runtime-version and --zones say otherwise.
accelerator_type() { case $1 in v5e-*) echo "v5litepod-${1#v5e-}" ;; *) echo "$1" ;; esac; }

runtime_of() {
  case $1 in
    v6e-*) echo v2-alpha-tpuv6e ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v5e-*) echo v2-alpha-tpuv5-lite ;;
    v4-*) echo tpu-ubuntu2204-base ;;
    *) fail "no image is known for $1; name one with --runtime-version" ;;
  esac
}

zones_of() {
  case $1 in
    v6e-*) echo us-east5-b,us-east5-a,us-east1-d,us-central1-b ;;
    v5p-*) echo us-east5-a,us-central1-a ;;
    v5e-*) echo us-west4-a,us-west1-c,us-south1-a,us-central1-a ;;
    v4-*) echo us-central2-b ;;
    *) fail "no zones are known for $1; name them with --zones" ;;
  esac
}

settle() { # the accelerator and the zones, from the options or the recipe
  [ -n "$ACCELERATOR" ] || [ -z "$RECIPE" ] || ACCELERATOR=$(accelerator_of "$RECIPE" ${WORDS[@]+"${WORDS[@]}"})
  [ -n "$ZONES" ] || [ -z "$ACCELERATOR" ] || ZONES=$(zones_of "$ACCELERATOR")
}

# --- Running and printing commands ----------------------------------------------------------------------------

quoted() { # the words as one line that can be pasted
  local word line='' apostrophe="'" escaped="'\\''" key
  for word in "$@"; do
    case $word in
      *[!A-Za-z0-9_./:=@%+,-]* | '')
        key=''
        case $word in --[a-z]*=*) key=${word%%=*}= word=${word#*=} ;; esac
        word="$key'${word//$apostrophe/$escaped}'"
        ;;
    esac
    line="$line${line:+ }$word"
  done
  printf '%s\n' "$line"
}

pause() { sleep "$1" & wait $! || true; }

limited() { # limited SECONDS COMMAND…: its exit code, or 124 after so long. macOS has no timeout(1).
  local code=0 end=$((SECONDS + $1))
  shift
  set -m # a process group of its own, so that gcloud goes together with its ssh
  "$@" < /dev/null &
  CHILD=$!
  set +m
  while kill -0 "$CHILD" 2>/dev/null; do
    if [ "$SECONDS" -ge "$end" ]; then
      kill -TERM -- "-$CHILD" 2>/dev/null || true
      wait "$CHILD" 2>/dev/null || true
      CHILD=''
      return 124
    fi
    pause 0.05
  done
  wait "$CHILD" || code=$?
  CHILD=''
  return "$code"
}

attempt() { # attempt SECONDS COMMAND…: stderr goes to $ERRORS; printed instead under --dry-run
  if [ "$DRY" ]; then quoted "${@:2}"; else limited "$@" 2> "$ERRORS"; fi
}

must() { # must WHAT SECONDS COMMAND…: or end with the error and its remedy
  local code=0
  attempt "${@:2}" || code=$?
  [ "$code" = 0 ] || explain "$1" "$code"
}

explain() { # explain WHAT CODE: the last lines of $ERRORS, the remedy, and the end
  grep -v '^SSH: Attempting\|^SCP: Attempting\|^Using s[sc][hp] batch' "$ERRORS" | tail -n 12 >&2 || true
  if [ "$2" = 124 ]; then
    echo "error: $1: no answer in time; tpu/tpu.sh status names the worker that is silent (an SSH key with a passphrase must be in an agent: ssh-add)" >&2
  else
    echo "error: $1 failed (exit code $2)" >&2
  fi
  remedy < "$ERRORS" >&2
  exit 1
}

remedy() { # the remedy of the first known error in the text on stdin; with --vm, of those in a log of the VM
  local text where pattern name help
  text=$(cat)
  [ -n "$text" ] || return 0
  while IFS=$'\t' read -r where pattern name help; do
    case $where in '#'*) continue ;; here) [ -z "$ON_VM" ] || continue ;; esac
    if grep -Eiq -- "$pattern" <<< "$text"; then
      echo "remedy: $name: $help"
      return
    fi
  done < tpu/remedies.tsv
}

remedies() { sed -n '/^#/!p' tpu/remedies.tsv | awk -F'\t' '{ printf "%s\n    %s\n", $3, $4 }'; }

tpus() { # tpus WORDS…: the gcloud command in the array GCLOUD
  GCLOUD=(gcloud compute tpus "$@" "--zone=$ZONE" ${PROJECT:+"--project=$PROJECT"} --quiet)
}

on_workers() { # on_workers WHAT SECONDS WORKERS COMMAND
  tpus tpu-vm ssh "$NAME" "--worker=$3" "--command=$4"
  must "$1" "$2" "${GCLOUD[@]}"
}

copy() { # copy WHAT SECONDS FROM TO WORKERS
  tpus tpu-vm scp "$3" "$4" "--worker=$5"
  must "$1" "$2" "${GCLOUD[@]}"
}

end() { # whatever ends the program: no secret stays, no child goes on
  local code=$?
  [ -z "$SECRET_FILE" ] || rm -f "$SECRET_FILE"
  [ -z "$CHILD" ] || kill -TERM -- "-$CHILD" 2>/dev/null || true
  [ -z "${SCRATCH:-}" ] || rm -rf "$SCRATCH"
  if [ -n "$QUEUED" ]; then
    echo "the request $NAME may still be granted in $QUEUED, and is billed from then on; tpu/tpu.sh delete --name $NAME --zones $QUEUED withdraws it" >&2
  fi
  exit "$code"
}

# --- Where the TPU is -----------------------------------------------------------------------------------------

state_in() { # state_in ZONE: the state of the queued resource and, of a failed one, the reason; NONE if there is none
  local code=0
  ZONE=$1
  tpus queued-resources describe "$NAME" '--format=value(state.state,state.failedData.error.message)'
  attempt "$PATIENCE" "${GCLOUD[@]}" || code=$?
  if [ "$code" != 0 ]; then
    grep -Eq 'NOT_FOUND|was not found' "$ERRORS" || explain "asking for $NAME in $1" "$code"
    echo NONE
  fi
}

remember() {
  mkdir -p "$KEPT"
  printf '%s\n' "$ZONE" "$ACCELERATOR" "$1" > "$KEPT/$NAME"
}

locate() { # sets ZONE: what create wrote down, or the first zone that has such a TPU
  local zone state
  if [ -z "$SESSION" ] && [ -f "$KEPT/$NAME" ]; then
    zone=$(head -n 1 "$KEPT/$NAME")
    case ,${LOOK_IN:-$zone}, in # unless --zones says to look elsewhere
      *",$zone,"*)
        ZONE=$zone ACCELERATOR=$(sed -n 2p "$KEPT/$NAME")
        return
        ;;
    esac
  fi
  settle
  [ -n "$ZONES" ] || fail "in which zone is $NAME? It was not created from here; give --zones"
  if [ "$DRY" ]; then
    ZONE=${ZONES%%,*}
    return
  fi
  for zone in ${ZONES//,/ }; do
    state=$(state_in "$zone") || exit 1
    ZONE=$zone
    [ "$state" = NONE ] || return 0
  done
  fail "there is no TPU $NAME in $ZONES; create one, or give its --name and --zones"
}

# --- The subcommands ------------------------------------------------------------------------------------------

create_command() { # create_command PRICING, for $ZONE
  local spot=''
  [ "$1" != spot ] || spot=--spot
  tpus queued-resources create "$NAME" "--node-id=$NAME" "--accelerator-type=$(accelerator_type "$ACCELERATOR")" \
    "--runtime-version=$RUNTIME" ${spot:+"$spot"} "--valid-until-duration=${VALID:-${WAIT}m}"
}

delete_command() { tpus queued-resources delete "$NAME" --force; }

create() {
  local other=on-demand pricing zone state first=1 tried=''
  settle
  [ -n "$RECIPE$ACCELERATOR" ] || fail "create what? Give a recipe, or --accelerator v6e-8"
  [ -n "$ACCELERATOR" ] || fail "$RECIPE names no hardware.accelerator: it is for the machine at hand; choose a TPU recipe, or give --accelerator"
  [ -n "$RUNTIME" ] || RUNTIME=$(runtime_of "$ACCELERATOR")
  [ "$PRICING" = spot ] || other=spot
  [ "$FALLBACK" ] || other=''
  say "create: $ACCELERATOR as a queued resource, $PRICING first${other:+, then $other}, in $ZONES"
  if [ -z "$DRY" ]; then
    for zone in ${ZONES//,/ }; do
      state=$(state_in "$zone") || exit 1
      case $state in
        NONE) continue ;;
        ACTIVE*)
          ZONE=$zone
          remember existing
          echo "$NAME is ACTIVE in $zone already; go on with: tpu/tpu.sh bootstrap --name $NAME"
          return
          ;;
        FAILED* | SUSPEND*) withdraw "$zone" "${state%%[[:space:]]*}" ;;
        *)
          echo "$NAME was asked for in $zone before: $state"
          if granted "$zone" existing; then return; fi
          ;;
      esac
    done
  fi
  for pricing in $PRICING $other; do
    for zone in ${ZONES//,/ }; do
      ZONE=$zone
      if [ "$DRY" ]; then
        show_attempt "$pricing" "$first"
        first=''
      elif asked "$zone" "$pricing" && granted "$zone" "$pricing"; then
        return
      fi
      tried="$tried $zone($pricing)"
    done
  done
  ZONE=${ZONES%%,*}
  [ "$DRY" ] || fail "no capacity for $ACCELERATOR; tried$tried; name more zones with --zones, wait longer with --wait, or try again later"
}

show_attempt() { # show_attempt PRICING FIRST: the first attempt as commands, the others as comments
  local indent='#   '
  [ -z "$2" ] || indent=''
  if [ -z "$2" ] && [ -z "$SHOWN" ]; then
    echo "# When that ends with FAILED or SUSPENDED, or is still waiting after $WAIT minutes, the next attempts are, in this order:"
    SHOWN=1
  fi
  if [ -z "$2" ]; then
    printf '#   '
    quoted "${LAST_DELETE[@]}"
  fi
  create_command "$1"
  printf '%s' "$indent"
  quoted "${GCLOUD[@]}"
  if [ "$2" ]; then
    tpus queued-resources describe "$NAME" '--format=value(state.state)'
    echo "until $(quoted "${GCLOUD[@]}") | grep -E 'ACTIVE|FAILED|SUSPENDED'; do sleep $POLL; done"
  fi
  delete_command
  LAST_DELETE=("${GCLOUD[@]}")
}
SHOWN='' LAST_DELETE=()

asked() { # asked ZONE PRICING: send the request; 1 when there is no capacity
  local code=0
  ZONE=$1
  echo "$1, $2: asking for $ACCELERATOR"
  create_command "$2"
  QUEUED=$1
  attempt "$((PATIENCE * 3))" "${GCLOUD[@]}" || code=$?
  [ "$code" != 0 ] || return 0
  [ "$code" = 124 ] || QUEUED='' # without an answer it may have been made
  no_capacity "$(cat "$ERRORS")" || explain "asking for $ACCELERATOR in $1" "$code"
  echo "$1, $2: no capacity"
  withdraw "$1" ''
  return 1
}

no_capacity() { case $(remedy <<< "$1") in 'remedy: no capacity'*) return 0 ;; *) return 1 ;; esac; }

granted() { # granted ZONE PRICING: wait until it is ACTIVE; 1 when there is no capacity
  local state word before='' start=$SECONDS minutes=$WAIT
  QUEUED=$1
  while :; do
    state=$(state_in "$1") || exit 1
    word=${state%%[[:space:]]*}
    [ "$word" = "$before" ] || echo "$1, $2: $word after $((SECONDS - start)) s"
    before=$word
    case $word in
      ACTIVE)
        QUEUED='' ZONE=$1
        remember "$2"
        echo "$NAME is ACTIVE in $1 ($2), and billed from now on until: tpu/tpu.sh delete --name $NAME"
        echo "go on with: tpu/tpu.sh bootstrap --name $NAME"
        return
        ;;
      PROVISIONING) minutes=$((WAIT + PROVISION_MINUTES)) ;; # chips are being made ready: worth more patience
      FAILED)
        withdraw "$1" "$word"
        # Without a reason it has expired: nobody had chips to give within --valid-until-duration.
        if [ -z "${state#FAILED}" ] || [ -z "$(tr -d '[:space:]' <<< "${state#FAILED}")" ] || no_capacity "$state"; then
          return 1
        fi
        echo "$state" > "$ERRORS"
        explain "the request in $1" 1
        ;;
      SUSPENDING | SUSPENDED | NONE | DELETING)
        withdraw "$1" "$word"
        return 1
        ;;
    esac
    if [ $((SECONDS - start)) -ge $((minutes * 60)) ]; then
      echo "$1, $2: still $word after $minutes minutes"
      withdraw "$1" "$word"
      return 1
    fi
    pause "$POLL"
  done
}

withdraw() { # withdraw ZONE STATE: a request that came to nothing still holds quota
  ZONE=$1
  [ -z "$2" ] || echo "$1: deleting the request ($2)"
  delete_command
  attempt "$((PATIENCE * 5))" "${GCLOUD[@]}" || grep -Eq 'NOT_FOUND|was not found' "$ERRORS" ||
    explain "deleting the request in $1" 1
  QUEUED=''
}

bootstrap() {
  local fetch
  locate
  check_commit
  say "bootstrap: commit ${COMMIT:0:12} on all workers of $NAME, from $([ "$BUNDLE" ] && echo 'a bundle of this clone' || echo "$REPOSITORY")"
  if [ "$DRY" ]; then echo "mkdir -p $KEPT"; else mkdir -p "$KEPT"; fi
  on_workers "making a folder on the workers" 300 all 'mkdir -p -m 700 .grpo'
  if [ "$BUNDLE" ]; then
    must "bundling the commit" 300 git bundle create --quiet "$KEPT/$NAME.bundle" HEAD
    copy "sending the bundle" 600 "$KEPT/$NAME.bundle" "$NAME:.grpo/repository.bundle" all
    fetch="test -d $FOLDER/.git || git init --quiet $FOLDER; cd $FOLDER; git fetch --quiet ../.grpo/repository.bundle HEAD"
  else
    fetch="test -d $FOLDER/.git || GIT_TERMINAL_PROMPT=0 git clone --quiet --no-checkout $(quoted "$REPOSITORY") $FOLDER; cd $FOLDER; GIT_TERMINAL_PROMPT=0 git fetch --quiet origin"
  fi
  on_workers "cloning at $COMMIT" 900 all "set -e; $fetch; git checkout --quiet --detach $COMMIT"
  send_secrets
  on_workers "installing requirements/tpu.lock" "$INSTALL_SECONDS" all "cd $FOLDER && tpu/on_vm.sh install"
  on_workers "counting the chips" 600 all "cd $FOLDER && tpu/on_vm.sh check"
  say "ready: tpu/tpu.sh run RECIPE --name $NAME"
}

refuse() { if [ "$DRY" ]; then echo "# would be refused now: $*"; else fail "$*"; fi; }

check_commit() { # COMMIT, and whether the VM can have it
  git rev-parse --git-dir > /dev/null 2>&1 || fail "this folder is no git clone, so there is no commit to clone; clone the repository"
  COMMIT=$(git rev-parse --verify --quiet "${COMMIT:-HEAD}^{commit}") || fail "there is no such commit here; fetch it, or leave out --commit"
  REPOSITORY=${REPOSITORY:-$(git remote get-url origin 2>/dev/null || true)}
  case $REPOSITORY in *://* | *@*:*) ;; *) BUNDLE=1 ;; esac # a folder of this machine, or none
  if [ -z "$ALLOW_DIRTY" ] && [ -n "$(git status --porcelain --untracked-files=no)" ]; then
    refuse "tracked files differ from the commit, and the VM would run without the differences; commit them, or add --allow-dirty"
  fi
  if [ "$BUNDLE" ]; then
    git merge-base --is-ancestor "$COMMIT" HEAD || refuse "a bundle holds HEAD and what is before it; check out ${COMMIT:0:12} first"
    [ "$(git rev-parse --is-shallow-repository)" = false ] || refuse "this clone is shallow and cannot be bundled; run git fetch --unshallow"
  elif [ -z "$(git branch --remotes --contains "$COMMIT")" ]; then
    refuse "commit ${COMMIT:0:12} is not pushed to $REPOSITORY, so the VM cannot clone it; push it, or add --bundle to send it as a file"
  fi
}

# The values are never expanded by this shell, so that neither its trace nor a command line can show them.
secret_lines() { env | grep -E "^($SECRETS)=."; }
secret_lengths() { awk '{ at = index($0, "="); printf "%s=%d\n", substr($0, 1, at - 1), length($0) - at }'; }

send_secrets() {
  local lengths pair file=$KEPT/$NAME.secrets
  lengths=$(secret_lines | secret_lengths || true)
  for pair in ${SECRETS//|/ }; do
    case $'\n'$lengths in
      *$'\n'"$pair="*) say "secret $pair: $(sed -n "s/^$pair=//p" <<< "$lengths") characters" ;;
      *) say "secret $pair: not set" ;;
    esac
  done
  if [ "$DRY" ]; then
    echo "(umask 077; env | grep -E '^($SECRETS)=.' > $file)"
  elif [ -z "$lengths" ]; then
    return 0
  else
    ! secret_lines | grep -q '=.*[[:space:]]' || fail "a secret has white space in it; set it again without"
    rm -f "$file"
    SECRET_FILE=$file
    secret_lines > "$file"
  fi
  copy "sending the secrets" 300 "$file" "$NAME:.grpo/secrets" all
  lengths=$(tr '\n' ' ' <<< "$lengths")
  lengths=${lengths% }
  on_workers "checking the secrets" "$PATIENCE" all "cd $FOLDER && tpu/on_vm.sh secrets${lengths:+ $lengths}"
  if [ "$DRY" ]; then echo "rm $file"; else rm -f "$file"; fi
  SECRET_FILE=''
}

run() {
  local wanted words
  [ -n "$RECIPE" ] || fail "run what? Give a recipe, such as recipes/qwen3-1.7b-gsm8k-smoke.yaml"
  RECIPE=$(recipe_file "$RECIPE")${RECIPE#"${RECIPE%%@*}"}
  wanted=$(accelerator_of "$RECIPE" ${WORDS[@]+"${WORDS[@]}"})
  locate
  [ -z "$wanted" ] || [ -z "$ACCELERATOR" ] || [ "$wanted" = "$ACCELERATOR" ] ||
    fail "$RECIPE is for $wanted, and $NAME is a $ACCELERATOR; choose another recipe or profile, or create another TPU with --name"
  say "run: has this recipe passed \`grpo preflight $RECIPE\`? An hour of a TPU costs more than the question"
  words=$(quoted "$RECIPE" ${WORDS[@]+"${WORDS[@]}"} ${OVERWRITE:+--overwrite})
  on_workers "looking for a run that is going on" "$PATIENCE" all "cd $FOLDER && tpu/on_vm.sh idle"
  on_workers "starting on all workers" "$((PATIENCE * 2))" all "cd $FOLDER && tpu/on_vm.sh start $words"
}

status() {
  local answer count worker pids=() busy=0 idle=0
  locate
  if [ "$DRY" ]; then
    tpus queued-resources describe "$NAME" '--format=value(state.state)'
    quoted "${GCLOUD[@]}"
    on_workers "" 0 all "cd $FOLDER && tpu/on_vm.sh status"
    return
  fi
  answer=$(state_in "$ZONE") || exit 1
  echo "$NAME: ${answer%%[[:space:]]*} in $ZONE"
  case $answer in
    ACTIVE*) ;;
    *) remedy <<< "${answer/NONE/NOT_FOUND}"; return ;;
  esac
  tpus tpu-vm describe "$NAME" '--format=value(networkEndpoints.len())'
  count=$(attempt "$PATIENCE" "${GCLOUD[@]}") || explain "asking for the workers" $?
  case $count in '' | *[!0-9]*) fail "gcloud names no workers of $NAME; is it still being made? Try again in a minute" ;; esac
  # Each worker for itself, so that one that hangs is named and does not hide the others.
  for ((worker = 0; worker < count; worker++)); do
    tpus tpu-vm ssh "$NAME" "--worker=$worker" "--command=cd $FOLDER && tpu/on_vm.sh status"
    (CHILD='' && trap - EXIT && limited "$PATIENCE" "${GCLOUD[@]}" > "$SCRATCH/$worker.out" 2> "$SCRATCH/$worker.err") &
    pids+=($!)
  done
  for ((worker = 0; worker < count; worker++)); do
    answer=0
    wait "${pids[$worker]}" || answer=$?
    cat "$SCRATCH/$worker.out"
    if [ "$answer" = 124 ]; then
      echo "worker $worker: no answer within $PATIENCE s"
    elif [ "$answer" != 0 ]; then
      echo "worker $worker: no answer: $(tail -n 1 "$SCRATCH/$worker.err")"
      remedy < "$SCRATCH/$worker.err" | sed "s/^/worker $worker: /"
    fi
    if grep -q ': running' "$SCRATCH/$worker.out"; then busy=$((busy + 1)); else idle=$((idle + 1)); fi
  done
  if [ "$busy" -gt 0 ] && [ "$idle" -gt 0 ]; then
    echo "$busy of $count workers run, and wait for the rest"
    remedy <<< 'TPU backend initialization is taking more than'
  fi
}

logs() {
  locate
  local follow=''
  [ -z "$FOLLOW" ] || follow=' -F'
  tpus tpu-vm ssh "$NAME" "--worker=$WORKER" "--command=tail -n 100$follow .grpo/run.log"
  if [ "$DRY" ]; then quoted "${GCLOUD[@]}"; else "${GCLOUD[@]}"; fi
}

fetch() {
  local name=${WORDS[0]:-} archive=$KEPT/$NAME.tar.gz packed place
  [ -z "$RECIPE" ] || name=$(run_of "$RECIPE" ${WORDS[@]+"${WORDS[@]}"})
  case $name in */* | .*) fail "name a run, such as qwen3-1.7b-gsm8k-smoke, and no path" ;; esac
  locate
  check_absent "$name"
  if [ "$DRY" ]; then
    on_workers "" 0 "$WORKER" "cd $FOLDER && tpu/on_vm.sh pack $name${ALL:+ --all}"
    copy "" 0 "$NAME:.grpo/fetch.tar.gz" "$archive" "$WORKER"
    echo "mkdir -p runs && tar -xzkf $archive -C runs   # -k: what is here already is not replaced"
    return
  fi
  mkdir -p "$KEPT" runs
  packed=$(on_workers "packing the run" 1800 "$WORKER" "cd $FOLDER && tpu/on_vm.sh pack $name${ALL:+ --all}") || exit 1
  name=$(tail -n 1 <<< "$packed")
  check_absent "$name"
  copy "fetching the run" "$INSTALL_SECONDS" "$NAME:.grpo/fetch.tar.gz" "$archive" "$WORKER"
  place=$(mktemp -d runs/.fetch.XXXXXX)
  tar -xzf "$archive" --no-same-owner -C "$place" || fail "what came is no whole archive; give the command again"
  [ ! -e "runs/$name" ] || mv "runs/$name" "$place/replaced"
  mv "$place/$name" "runs/$name"
  rm -rf "$place" "$archive"
  chmod -R u+rwX,go+rX "runs/$name"
  echo "runs/$name"
  [ ! -f "runs/$name/report.html" ] || echo "runs/$name/report.html"
}

check_absent() {
  [ -z "$1" ] || [ "$OVERWRITE$DRY" ] || [ ! -e "runs/$1" ] ||
    fail "runs/$1 is here already and is not touched; add --overwrite to replace it, or move it away"
}

stop() {
  locate
  on_workers "ending the run" "$((PATIENCE + 60))" all "cd $FOLDER && tpu/on_vm.sh stop"
}

delete() {
  local answer
  locate
  say "delete: the VM $NAME in $ZONE and its disk; a run that was not fetched is gone"
  if [ -z "$DRY$YES" ]; then
    read -r -p "type $NAME to delete it: " answer || true
    [ "$answer" = "$NAME" ] || fail "nothing was deleted"
  fi
  delete_command
  if [ "$DRY" ]; then quoted "${GCLOUD[@]}"; return; fi
  withdraw "$ZONE" ''
  answer=$(state_in "$ZONE") || exit 1
  [ "$answer" = NONE ] || fail "$NAME is ${answer%%[[:space:]]*} still, and billed; look again with tpu/tpu.sh status"
  rm -f "$KEPT/$NAME"
  echo "$NAME is deleted: its chips, its VMs and their disks are no longer billed. What lies in Cloud Storage still is."
}

session() {
  [ -n "$RECIPE" ] || fail "a session of which recipe? Give one, such as recipes/qwen3-1.7b-gsm8k-smoke.yaml"
  DRY=1 SESSION=1
  echo "# A session of $RECIPE, to be run in the repository's folder; lines with # are comments."
  create
  echo
  bootstrap
  echo
  run
  echo
  say "status: what every worker is doing"
  status
  echo
  say "logs: the end of worker 0's log; Ctrl-C ends the look, not the run"
  FOLLOW=1
  logs
  echo
  say "fetch: the run without its checkpoints, to runs/"
  fetch
  echo
  delete
}

# --- Reading the command line ---------------------------------------------------------------------------------

value() { [ -n "${2:-}" ] || fail "$1 needs a value"; }

main() {
  local command='' help=''
  while [ $# -gt 0 ]; do
    case $1 in
      -h | --help) help=1 ;;
      --dry-run) DRY=1 ;;
      --spot) PRICING=spot ;;
      --on-demand) PRICING=on-demand ;;
      --no-fallback) FALLBACK='' ;;
      --bundle) BUNDLE=1 ;;
      --allow-dirty) ALLOW_DIRTY=1 ;;
      --all) ALL=1 ;;
      --yes) YES=1 ;;
      -f | --follow) FOLLOW=1 ;;
      --overwrite) OVERWRITE=1 ;;
      --vm) ON_VM=1 ;;
      --run) value "$@"; WORDS+=("$1" "$2"); shift ;;
      --name) value "$@"; NAME=$2; shift ;;
      --project) value "$@"; PROJECT=$2; shift ;;
      --zones | --zone) value "$@"; ZONES=$2 LOOK_IN=$2; shift ;;
      --accelerator) value "$@"; ACCELERATOR=$2; shift ;;
      --runtime-version) value "$@"; RUNTIME=$2; shift ;;
      --wait) value "$@"; WAIT=$2; shift ;;
      --valid-until-duration) value "$@"; VALID=$2; shift ;;
      --repository) value "$@"; REPOSITORY=$2; shift ;;
      --commit) value "$@"; COMMIT=$2; shift ;;
      --worker) value "$@"; WORKER=$2; shift ;;
      -*) fail "unknown option $1; see tpu/tpu.sh ${command:+$command }--help" ;;
      *.yaml | *.yaml@*) RECIPE=$1 ;;
      *)
        [ -z "$RECIPE" ] || command=${command:-session} # --dry-run RECIPE KEY=VALUE
        case $command in
          '') command=$1 ;;
          fetch) WORDS+=("$1") ;;
          run | session | create)
            case $1 in *=*) WORDS+=("$1") ;; *) fail "$1 is neither a recipe (FILE.yaml) nor a change (KEY=VALUE)" ;; esac
            ;;
          *) fail "$command takes no $1; see tpu/tpu.sh $command --help" ;;
        esac
        ;;
    esac
    shift
  done
  [ -n "$command" ] || [ -z "$DRY" ] || [ -z "$RECIPE" ] || command=session
  case $command in
    create | bootstrap | run | status | logs | fetch | stop | delete | session | remedy | remedies) ;;
    '') usage; [ "$help" ] || exit 2; return ;;
    *) fail "unknown command $command; see tpu/tpu.sh --help" ;;
  esac
  [ -z "$help" ] || { usage "$command"; return; }
  case $NAME in [!a-z]* | *[!a-z0-9-]* | *-) fail "--name $NAME: use small letters, digits and hyphens, beginning with a letter" ;; esac
  case $WAIT in '' | *[!0-9]*) fail "--wait $WAIT: give whole minutes" ;; esac
  case $WORKER in '' | *[!0-9]*) fail "--worker $WORKER: give a number, from 0 on" ;; esac
  case $command in
    remedy | remedies | session) ;;
    *) [ "$DRY" ] || command -v gcloud > /dev/null || fail "gcloud is not installed; see cloud.google.com/sdk/docs/install" ;;
  esac
  SCRATCH=$(mktemp -d "${TMPDIR:-/tmp}/tpu.XXXXXX")
  ERRORS=$SCRATCH/errors
  : > "$ERRORS"
  trap end EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
  "$command"
}

main "$@"
