#!/bin/sh
# Check docs/protocol/commit.pml and history.pml with Spin: the sound protocol holds, and each rule
# that is broken on purpose is missed. From the root of the repository: make check-protocol
set -eu
model=commit.pml
here=$(cd "$(dirname "$0")" && pwd)
build=$here/../../.build/protocol
mkdir -p "$build"

spin=$(command -v spin || true)
if [ -z "$spin" ]; then # without root: the package, unpacked
    spin=$build/spin/usr/bin/spin
    [ -x "$spin" ] || (cd "$build" && apt-get download -q spin && dpkg -x spin_*.deb spin) >/dev/null 2>&1 || true
fi
if [ ! -x "$spin" ] || ! command -v gcc >/dev/null; then
    echo "check-protocol needs spin and gcc: apt-get install spin gcc (or https://spinroot.com), then make check-protocol again" >&2
    exit 1
fi

# NAME EXPECTED-ERRORS PAN-FLAGS COMPILER-FLAGS MODEL-FLAGS...
run() {
    name=$1 expected=$2 limits=$3 store=$4
    shift 4
    rm -rf "$build/run" && mkdir -p "$build/run" && cd "$build/run"
    cp "$here/$model" .
    "$spin" -a "$@" "$model" >/dev/null
    gcc -w -O2 -DSAFETY $store -DMEMLIM=3500 -o pan pan.c
    ./pan -m300000 -n $limits >out 2>&1 || true
    errors=$(sed -n 's/.*errors: \([0-9]*\)/\1/p' out | head -1)
    states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' out)
    printf '%-60s %12s states, errors: %s (%s expected)\n' "$name" "$states" "${errors:-?}" "$expected"
    if [ "${errors:-?}" != "$expected" ] || grep -Eq 'max search depth too small|out of memory|memory limit' out; then
        cat out
        [ ! -f "$model.trail" ] || "$spin" -p -t "$@" "$model" | tail -60
        exit 1
    fi
}

echo "all states of three ranks:"
run "nobody dies, the store goes, someone finishes" 0 "" -DCOLLAPSE -DCRASHES=0 -DFINISHERS=1 -DSTORE_GOES
run "one dies at any step, agents of two nodes copy" 0 "" -DCOLLAPSE -DCRASHES=1 -DFINISHERS=0 -DNODES
run "nobody dies, agents bring copies beside the ranks" 0 "" -DCOLLAPSE -DCRASHES=0 -DFINISHERS=0 -DNODES -DBUDDY
run "one dies at any step, an agent finishes, copies, removes" 0 "" -DCOLLAPSE -DCRASHES=1 -DFINISHERS=0 -DAGENT
run "another job restores, or takes the root, and removes" 0 "" -DCOLLAPSE -DCRASHES=0 -DFINISHERS=0 -DOTHERS=1
echo "all states after a save was refused:"
run "a detach, one dies, the ranks live on beside an agent" 0 "" -DCOLLAPSE -DABORTED -DCRASHES=1 -DFINISHERS=0 -DAGENT -DDETACH
run "one dies, the ranks live on beside agents of two nodes" 0 "" -DCOLLAPSE -DABORTED -DCRASHES=1 -DFINISHERS=1 -DNODES
run "one dies, the ranks live on, agents bring copies" 0 "" -DCOLLAPSE -DABORTED -DCRASHES=1 -DFINISHERS=0 -DNODES -DBUDDY
echo "all states after three ranks have ended:"
run "agents of two nodes, another job, a finisher, a pruner" 0 "" -DCOLLAPSE -DSAVED -DFINISHERS=1 -DOTHERS=1 -DPRUNER -DNODES
run "two other jobs, a finisher, a reader that pins" 0 "" -DCOLLAPSE -DSAVED -DFINISHERS=1 -DOTHERS=2 -DPINNER
run "an agent, another job, a finisher, a pruner, a reader" 0 "" -DCOLLAPSE -DSAVED -DFINISHERS=1 -DOTHERS=1 -DPINNER -DAGENT -DPRUNER
echo "as many states as a minute has, of three ranks, two attempts, two tiers, three deaths:"
run "two finishers, a pruner" 0 "-Q1 -w30" -DBITSTATE -DATTEMPTS=2 -DTIERS=2 -DCRASHES=3 -DFINISHERS=2 -DPRUNER -DSTORE_GOES
run "two other jobs, an agent, a reader" 0 "-Q1 -w30" -DBITSTATE -DATTEMPTS=2 -DTIERS=2 -DCRASHES=3 -DFINISHERS=0 -DOTHERS=2 -DPINNER -DAGENT -DSTORE_GOES
echo "broken on purpose:"
for bug in REFUSE_WITHOUT_CAS TAKE_WITHOUT_CAS; do
    run "$bug" 1 "" -DCOLLAPSE -DBUG_$bug -DCRASHES=0 -DFINISHERS=0
done
for bug in CLEAR_WITHOUT_MARK UNMARK_EARLY FINISH_WITHOUT_MARK FINISH_WITHOUT_LOOK; do
    run "$bug" 1 "" -DCOLLAPSE -DBUG_$bug -DCRASHES=0 -DFINISHERS=1
done
for bug in CONFIRM_ONCE UNKNOWN_IS_DEAD EVICT_BEGUN; do
    run "$bug" 1 "" -DCOLLAPSE -DBUG_$bug -DCRASHES=0 -DFINISHERS=0 -DOTHERS=1
done
for bug in REMOVE_WITHOUT_TOMBSTONE TOMBSTONE_GOES_EARLY; do
    run "$bug" 1 "" -DCOLLAPSE -DBUG_$bug -DCRASHES=0 -DFINISHERS=0 -DOTHERS=1
done
for bug in REMOVE_WITHOUT_MARK UNMARK_REMOVAL_EARLY; do
    run "$bug" 1 "" -DCOLLAPSE -DBUG_$bug -DSAVED -DFINISHERS=1 -DOTHERS=1
done
for bug in MARK_AFTER_PINS PINNED_UNMARKS PIN_WITHOUT_LOOK RENEW_WITHOUT_OVERLAP; do
    run "$bug" 1 "" -DCOLLAPSE -DBUG_$bug -DSAVED -DFINISHERS=0 -DOTHERS=2 -DPINNER
done
run "FINISH_WITHOUT_MARK, by an agent that copies" 1 "" -DCOLLAPSE -DBUG_FINISH_WITHOUT_MARK -DSAVED -DFINISHERS=0 -DPRUNER -DAGENT
run "FINISH_WITHOUT_LOOK, by an agent that copies" 1 "" -DCOLLAPSE -DBUG_FINISH_WITHOUT_LOOK -DSAVED -DFINISHERS=0 -DPRUNER -DAGENT
run "CLEAR_AFTER_DETACH" 1 "" -DCOLLAPSE -DBUG_CLEAR_AFTER_DETACH -DABORTED -DCRASHES=0 -DFINISHERS=0 -DAGENT -DDETACH
run "an agent that waits for two of three ranks" 1 "" -DCOLLAPSE -DABORTED -DCRASHES=0 -DFINISHERS=0 -DAGENT -DHERE=3
run "COPY_WITHOUT_NOTES" 1 "" -DCOLLAPSE -DBUG_COPY_WITHOUT_NOTES -DABORTED -DCRASHES=0 -DFINISHERS=0 -DNODES
run "BRING_WITHOUT_MARK" 1 "" -DCOLLAPSE -DBUG_BRING_WITHOUT_MARK -DABORTED -DCRASHES=0 -DFINISHERS=0 -DNODES -DBUDDY
run "AGENT_DOES_NOT_WAIT" 1 "" -DCOLLAPSE -DBUG_AGENT_DOES_NOT_WAIT -DCRASHES=0 -DFINISHERS=0 -DAGENT
model=history.pml
echo "all states of two jobs that go back:"
run "a death at any moment, a tier that is away, late puts" 0 "" -DHC4 -DJOBS=2
echo "broken on purpose:"
for bug in SAME_TRIAL OWN_TRIAL_UNSAID RECORD_AFTER_SAVE RANKS_CHOOSE NEAREST_RECORD; do
    run "$bug" 1 "" -DHC4 -DJOBS=2 -DBUG_$bug
done
echo "the protocol holds, and the models tell when it does not"
