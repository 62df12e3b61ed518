#!/bin/bash
# Start the ckpt agent of the job's user on this node before the job: docs/launch/slurm.md explains
# it. The administrator names this script in slurm.conf, and slurmd runs it as root:
#
#     Prolog=/etc/slurm/prolog.d/ckpt.sh
#     PrologFlags=Alloc
#
# It does nothing for a user who has no ckpt. It ends with status 0 in any case, since Slurm drains
# a node whose prolog fails.

export PATH=/usr/sbin:/usr/bin:/sbin:/bin # Slurm sets no PATH

# The ckpt of a user is ~/.config/ckpt/command. This is the ckpt of users who have none; or empty.
command=${CKPT_PROLOG_COMMAND:-}
# A job waits for its agent no longer than this.
seconds=${CKPT_PROLOG_SECONDS:-15}
# The agent ends after so long without a job. It has to wait until the trainer has started.
idle=${CKPT_AGENT_IDLE_SECONDS:-3600}

# Slurm waits until the output of a prolog is closed.
exec </dev/null >/dev/null 2>&1
# slurmd may be exempt from the killer of processes when memory is short. The agent is not.
echo 0 >/proc/self/oom_score_adj
set -o pipefail

# Start the agent as the user, without the environment of root. Print the status and the last words.
# The agent has a session of its own: Slurm kills the process group of a prolog at its end.
start() {
    local name group home said status
    IFS=: read -r name _ _ group _ home _ < <(getent passwd "$SLURM_JOB_UID")
    # shellcheck disable=SC2016 # the shell of the user replaces $HOME and $1
    said=$(
        env -i PATH="$PATH" HOME="$home" USER="$name" LOGNAME="$name" \
            CKPT_AGENT_IDLE_SECONDS="$idle" \
            timeout --kill-after=1 "$seconds" \
            setpriv --reuid "$SLURM_JOB_UID" --regid "$group" --init-groups --inh-caps=-all \
            /bin/sh -c '
                cd /
                if [ -x "$HOME/.config/ckpt/command" ]; then set -- "$HOME/.config/ckpt/command"; fi
                [ -n "$1" ] || exit 0
                exec "$1" agent start' sh "$command" 2>&1 |
            tail --bytes 300 | tr --complement '[:print:]' ' '
    )
    status=$?
    printf '%s %s\n' "$status" "$said"
}

# What the user has, such as a home folder on a server that is down, holds up the job for no longer.
unset status said
read -r -t "$((seconds + 2))" status said < <(start)
if [ "$status" != 0 ]; then
    logger -t ckpt-prolog -- "job $SLURM_JOB_ID: user $SLURM_JOB_UID has no agent:" \
        "status ${status:-none}: $said"
fi
exit 0
