/* The commit protocol of ckpt as a model for Spin. Prose: docs/protocol.md. Code: ckpt/coordination/{commit_state_machine,committer,claim_marker}.py, ckpt/catalog/finalize.py.

   Time is not modelled: whoever waits may lose its patience at any moment, which covers every delay, every stop and every clock. A crash may come before every step (CRASHES of them in
   all), what a process was putting may arrive after its death, or arrive though the answer was lost, or be put twice.

   Another job may come (OTHERS of them). It takes the root over and removes a checkpoint, or it
   only restores and removes one. An agent (AGENT) finishes a save, or copies a step to the tier from
   another tier, file by file, or removes a checkpoint. It begins when the ranks that it sees (HERE:
   all of them) have ended, or when the job was left to it (DETACH), and the ranks live on. If nodes
   have tiers of their own, each of two agents (NODES) copies the files of its own ranks, once all ranks
   are noted to have ended. If one of the nodes is lost (BUDDY), the agent of the other brings the files of
   its ranks from copies, and these ranks may live. A reader (PINNER) pins
   a step, renews the pin, and reads. Each of them may die before every step.

   If another job removes a checkpoint, it leaves a tombstone in place of the manifest, which goes when
   no manifest of that step is on its way, and no rank is between its last look at the owner and its put.
   Whoever copies the step again deletes the tombstone behind its marker, when all files are there.
   An agent, which removes what is of its own job, leaves none: it deletes a manifest when none is on its
   way. An agent removes a checkpoint when all ranks have ended, and no rank discards a save when the
   agent begins. A marker that another process has deleted is not put
   again before the process that had put it is over. These are assumptions of docs/protocol.md.

   Not modelled: a disk that is too full for a marker, and markers that are a day old.

   -DATTEMPTS=2 -DTIERS=2 -DCRASHES=n -DFINISHERS=n -DOTHERS=n -DPRUNER -DAGENT -DHERE=mask -DDETACH
   -DNODES -DBUDDY -DPINNER. -DSAVED begins when all ranks have ended, with any result; -DABORTED when a save was
   refused, before a rank discards it. Each -DBUG_... breaks one rule on purpose.  */

#ifndef ATTEMPTS
#define ATTEMPTS 1
#endif
#ifndef TIERS
#define TIERS 1
#endif
#ifndef CRASHES
#define CRASHES 2
#endif
#ifndef FINISHERS
#define FINISHERS 1
#endif
#ifndef OTHERS
#define OTHERS 0
#endif
#define RANKS 3
#define ALL 7
#ifndef HERE
#define HERE ALL /* the ranks on the node of the agent */
#endif
#define SAVES 4 /* of one attempt on one tier each */
#define S (a * 2 + t)

#define NONE 0
/* words */
#define DURABLE 1
#define FAILED 2
/* intent */
#define REFUSE 1
#define GO 2
/* turn */
#define TAKEN 1
#define WITHDRAWN 2
/* outcome */
#define COMMITTED 1
#define REFUSED 2
#define UNKNOWN 3
/* mark on the tier */
#define BY_JOB 1
#define BY_FINISHER 2
#define BY_REMOVER 3 /* of a checkpoint */

/* the owner of a root, if it is neither attempt */
#define ANOTHER 2

/* the job's store of each attempt: gone with it when it dies */
byte word[12], intent[SAVES], turn[SAVES], outcome[SAVES];
bool gone[2];
/* a tier */
byte data[SAVES], fragment[SAVES], mark[SAVES];
bool manifest[SAVES], tomb[SAVES];
byte owner[2];
/* puts on their way, of the dead or of those who got no answer */
byte late_fragment[SAVES];
bool late_manifest[SAVES];
/* for the claims below */
byte crashes, ended[2]; /* the ranks that have */
#ifdef DETACH
bool left[2]; /* all ranks leave the job to the agent */
byte discarding[2]; /* ranks that discard just now */
#endif
bool finisher_put[SAVES], evicted[SAVES];
byte putting[SAVES]; /* ranks that have looked whose the root is, and put now */
#ifdef NODES
byte noted[SAVES]; /* ranks that their agents have seen end */
#ifdef BUDDY
byte removes[SAVES], brought[SAVES]; /* the markers of ranks: by the rank itself, or by the agent of another node */
#endif
#endif
#if OTHERS > 0 || defined(AGENT) || defined(NODES)
#define REMOVALS
byte marking[SAVES], stale[SAVES]; /* those that go on with a marker; whose marker another deleted */
byte pins[SAVES], held[SAVES]; /* a pin, and a later one in its place; those that a reader trusts */
#endif

#define WORD(r) word[(S) * 3 + (r)]
#define ALL_DURABLE (WORD(0) == DURABLE && WORD(1) == DURABLE && WORD(2) == DURABLE)
#define ONE_FAILED (WORD(0) == FAILED || WORD(1) == FAILED || WORD(2) == FAILED)
#define MINE (1 << r)

/* Rule 2: what is listed is whole when it appears, and stays so. */
#define WHOLE(s) (data[s] == ALL && fragment[s] == ALL)
#define APPEAR(s) manifest[s] = true; assert(WHOLE(s))
#define MAY_DELETE(s) assert(!manifest[s])

#define CLAIM owner[t] = (r == 0 -> a : owner[t])
#if defined(PRUNER) || defined(REMOVALS)
#define ENDED(a) ended[a] = ended[a] | MINE
#else
#define ENDED(a) skip
#endif
#ifdef DETACH
#define CLEARED discarding[a] = discarding[a] & (ALL - MINE)
#else
#define CLEARED skip
#endif
#define MAY_CRASH :: crashes < CRASHES -> crashes++; goto dead
#define IF_GONE :: gone[a] -> goto lost

proctype Rank(byte a; byte r)
{
  byte t = 0;
  bool failed, seen, exclusive, spoiled, unanswered; /* seen: that the intent is to commit */

#ifdef ABORTED
  goto done;
#endif
save:
  if /* the leader takes the root over, as it thinks the other attempt dead; its file and its fragment */
  MAY_CRASH
  :: atomic { CLAIM; failed = true }
  :: atomic { CLAIM; data[S] = data[S] | MINE; failed = true }
  :: atomic { CLAIM; data[S] = data[S] | MINE; late_fragment[S] = late_fragment[S] | MINE; failed = true }
  :: atomic { CLAIM; data[S] = data[S] | MINE; fragment[S] = fragment[S] | MINE; failed = true } /* no answer */
  :: atomic { CLAIM; data[S] = data[S] | MINE; fragment[S] = fragment[S] | MINE }
  fi;
  if
  MAY_CRASH
  IF_GONE
  :: atomic { !gone[a] && failed -> WORD(r) = FAILED }
  :: atomic { !gone[a] && !failed -> WORD(r) = DURABLE }
  fi;

wait: /* for the outcome, for words, for what others do; patience may be over at any time */
  if
  MAY_CRASH
  IF_GONE
  :: atomic { !gone[a] && outcome[S] != NONE -> goto done }
  :: atomic { !gone[a] && intent[S] == REFUSE && r != 0 -> goto conclude_refused }
  :: atomic { !gone[a] && intent[S] == GO && r != 0 && !seen -> seen = true; goto wait }
  :: atomic { !gone[a] && !seen && (intent[S] == NONE || r == 0) && ONE_FAILED -> goto propose_refusal }
  :: atomic { !gone[a] && !seen && (intent[S] == NONE || r == 0) && !ALL_DURABLE -> goto propose_refusal }
  :: atomic { !gone[a] && !seen && (intent[S] == NONE || r == 0) && ALL_DURABLE && !spoiled -> goto merge }
  :: atomic { !gone[a] && seen && ALL_DURABLE && !spoiled -> goto merge }
  :: atomic { !gone[a] && seen -> spoiled = false; exclusive = false; goto conclude_unknown }
  fi;

merge: /* and see that the root is still this attempt's */
  if
  MAY_CRASH
  :: atomic { owner[t] == a && fragment[S] == ALL && !seen -> goto propose_go }
  :: atomic { owner[t] == a && fragment[S] == ALL && seen -> goto take }
  :: atomic { !(owner[t] == a && fragment[S] == ALL) && !seen -> goto propose_refusal }
  :: atomic { !(owner[t] == a && fragment[S] == ALL) && seen -> spoiled = true; goto wait }
  fi;

propose_refusal:
  if
  MAY_CRASH
  IF_GONE
#ifdef BUG_REFUSE_WITHOUT_CAS
  :: atomic { !gone[a] -> intent[S] = REFUSE; goto conclude_refused }
#else
  :: atomic { !gone[a] && intent[S] != GO -> intent[S] = REFUSE; goto conclude_refused }
  :: atomic { !gone[a] && intent[S] == GO -> seen = true; goto wait }
#endif
  fi;

propose_go:
  if
  MAY_CRASH
  IF_GONE
  :: atomic { !gone[a] && intent[S] == NONE -> intent[S] = GO; seen = true; exclusive = true; goto put }
  :: atomic { !gone[a] && intent[S] == REFUSE -> goto conclude_refused }
  :: atomic { !gone[a] && intent[S] == GO -> seen = true; goto wait }
  fi;

take:
  if
  MAY_CRASH
  IF_GONE
#ifdef BUG_TAKE_WITHOUT_CAS
  :: atomic { !gone[a] -> goto put }
#else
  :: atomic { !gone[a] && turn[S] != WITHDRAWN -> turn[S] = TAKEN; goto put }
  :: atomic { !gone[a] && turn[S] == WITHDRAWN -> goto conclude_refused }
#endif
  fi;

put: /* each try looks whose the root is */
  if
  MAY_CRASH
#ifdef BUG_CONFIRM_ONCE
  :: atomic { putting[S]++ }
#else
  :: atomic { owner[t] == a -> putting[S]++ }
  :: atomic { owner[t] != a && exclusive && !unanswered && !manifest[S] -> goto withdraw }
  :: atomic { owner[t] != a && !(exclusive && !unanswered && !manifest[S]) -> goto put_failed }
#endif
  fi;
  if /* if absent, and content with what is there already: it is the same */
  :: atomic { crashes < CRASHES -> crashes++; putting[S]--; goto dead }
  :: atomic { crashes < CRASHES -> crashes++; putting[S]--; late_manifest[S] = true; goto dead }
  :: atomic { !tomb[S] -> putting[S]--; APPEAR(S); goto conclude_committed }
  :: atomic { tomb[S] && exclusive && !unanswered -> putting[S]--; goto withdraw }
  :: atomic { tomb[S] && !(exclusive && !unanswered) -> putting[S]--; goto put_failed }
  :: atomic { !manifest[S] && exclusive && !unanswered -> putting[S]--; goto withdraw } /* the store said no */
  :: atomic { putting[S]--; unanswered = true; late_manifest[S] = true }
  :: atomic { !tomb[S] -> putting[S]--; unanswered = true; APPEAR(S) }
  fi;
  if
  :: goto put /* again */
  :: goto put_failed
  fi;
put_failed:
  atomic { if :: exclusive -> goto conclude_unknown :: else -> spoiled = true; goto wait fi };

withdraw:
  if
  MAY_CRASH
  IF_GONE
  :: atomic { !gone[a] && turn[S] != TAKEN -> turn[S] = WITHDRAWN; goto conclude_refused }
  :: atomic { !gone[a] && turn[S] == TAKEN -> exclusive = false; spoiled = true; goto wait }
  fi;

conclude_committed:
  if
  MAY_CRASH
  IF_GONE
  :: atomic { !gone[a] -> if :: outcome[S] == NONE -> outcome[S] = COMMITTED :: else fi; goto done }
  fi;
conclude_refused:
  if
  MAY_CRASH
  IF_GONE
  :: atomic { !gone[a] -> if :: outcome[S] == NONE -> outcome[S] = REFUSED :: else fi; goto done }
  fi;
conclude_unknown:
  if
  MAY_CRASH
  IF_GONE
  :: atomic { !gone[a] -> if :: outcome[S] == NONE -> outcome[S] = UNKNOWN :: else fi; goto done }
  fi;

done:
  atomic {
    assert(outcome[S] != COMMITTED || manifest[S] || evicted[S]);
    assert(outcome[S] != REFUSED || !manifest[S] || finisher_put[S]);
    WORD(r) = NONE; /* forgotten */
    seen = false; exclusive = false; spoiled = false; unanswered = false;
    if
    :: outcome[S] == REFUSED || failed -> goto discard
    :: else -> goto next
    fi
  };

lost: /* the job's store is gone: a rank that has failed discards its own, the others do not know */
  if
  :: failed -> goto discard
  :: else -> goto over
  fi;

discard:
#ifdef DETACH
  if
#ifdef BUG_CLEAR_AFTER_DETACH
  :: true
#else
  :: left[a] -> goto next
  :: atomic { !left[a] -> discarding[a] = discarding[a] | MINE }
#endif
  fi;
#endif
#ifdef BUDDY
  if
  MAY_CRASH
  :: atomic { (brought[S] & MINE) != 0 -> goto next }
  :: atomic { (brought[S] & MINE) == 0 -> removes[S] = removes[S] | MINE }
  fi;
#endif
  if
  MAY_CRASH
#ifdef BUG_CLEAR_WITHOUT_MARK
  :: true
#else
  :: atomic { mark[S] == NONE || mark[S] == BY_JOB -> mark[S] = BY_JOB }
  :: atomic { mark[S] == BY_FINISHER || mark[S] == BY_REMOVER -> goto kept }
#endif
  fi;
  if
  MAY_CRASH
  :: atomic { manifest[S] -> mark[S] = NONE; goto kept }
  :: !manifest[S]
  fi;
#ifdef BUG_UNMARK_EARLY
  if
  MAY_CRASH
  :: atomic { mark[S] = NONE }
  fi;
#endif
  if
  MAY_CRASH
  :: atomic { MAY_DELETE(S); fragment[S] = fragment[S] & (ALL - MINE) }
  fi;
  if
  MAY_CRASH
  :: atomic { MAY_DELETE(S); data[S] = data[S] & (ALL - MINE) }
  fi;
  if
  MAY_CRASH
  :: atomic { mark[S] = NONE }
  fi;

kept:
#ifdef BUDDY
  if
  MAY_CRASH
  :: atomic { removes[S] = removes[S] & (ALL - MINE) }
  fi;
#endif

next:
  atomic {
    CLEARED;
    failed = false;
    if
    :: t + 1 < TIERS && !gone[a] -> t++; goto save
    :: else
    fi
  };

dead:
over:
  atomic { CLEARED; seen = false; exclusive = false; spoiled = false; failed = false; unanswered = false; t = 0; ENDED(a) }
}

#ifdef REMOVALS
#define MAY_MARK(kind) (mark[S] == kind || (mark[S] == NONE && stale[S] == 0))
#define MARK(kind) mark[S] = kind; marking[S] = marking[S] | me
#define UNMARK mark[S] = NONE; stale[S] = marking[S] & ~me
#define LEAVE marking[S] = marking[S] & ~me; stale[S] = stale[S] & ~me
#else
#define MAY_MARK(kind) (mark[S] == kind || mark[S] == NONE)
#define MARK(kind) mark[S] = kind
#define UNMARK mark[S] = NONE
#define LEAVE skip
#endif

/* A finisher puts its marker, looks, puts the manifest, and deletes the marker. `may` is its last
   look at the owner. */
inline finish(may)
{
  if
  :: goto over
#ifdef BUG_FINISH_WITHOUT_MARK
  :: true
#else
  :: atomic { MAY_MARK(BY_FINISHER) -> MARK(BY_FINISHER) }
#endif
  fi;
#ifndef BUG_FINISH_WITHOUT_LOOK
  if :: goto over :: data[S] == ALL fi;
  if :: goto over :: fragment[S] == ALL fi;
#endif
  if :: goto over :: may fi;
#if OTHERS > 0
  if :: goto over :: atomic { tomb[S] = false } fi;
#endif
  if
  :: goto over
  :: atomic { late_manifest[S] = true; finisher_put[S] = true; goto over } /* it dies, and its put arrives */
  :: atomic { APPEAR(S); finisher_put[S] = true }
  fi;
  if :: goto over :: atomic { UNMARK; LEAVE } fi
}

/* `ckpt finalize --job-is-dead`, or the restore of a later job: at any moment, also while the job lives. */
proctype Finisher(byte me)
{
  byte a = 0, t = 0;
  if :: true :: TIERS == 2 -> t = 1 fi;
  if :: true :: ATTEMPTS == 2 -> a = 1 fi;
  if :: atomic { owner[t] == a && WHOLE(S) } :: goto over fi;
  finish(true);
over:
  atomic { LEAVE }
}

#ifdef REMOVALS
#define NOTHING_COMES (!late_manifest[S] && putting[S] == 0)

/* A checkpoint is removed, or what a removal that was cut off has left. `may` is the last look at
   the owner, and `leaves` whether a tombstone is left. A remover that dies is followed by one more. */
inline remove(may, leaves)
{
  if :: goto over :: may fi;
#ifdef BUG_REMOVE_WITHOUT_MARK
  skip;
#else
#ifdef BUG_MARK_AFTER_PINS
  if :: pins[S] != 0 -> goto over :: pins[S] == 0 fi;
#endif
  if
  :: goto over
  :: atomic { MAY_MARK(BY_REMOVER) -> MARK(BY_REMOVER) }
  fi;
#endif
#ifndef BUG_MARK_AFTER_PINS
  if :: atomic { (pins[S] & 1) != 0 -> goto pinned } :: (pins[S] & 1) == 0 fi; /* in their order */
  if :: atomic { (pins[S] & 2) != 0 -> goto pinned } :: (pins[S] & 2) == 0 fi;
#endif
  if
  :: goto cut
  :: atomic {
      leaves || NOTHING_COMES -> assert(held[S] == 0);
      assert(owner[t] != a || ended[a] == ALL); /* of a job that lives, and has the root */
      manifest[S] = false; evicted[S] = true;
      tomb[S] = leaves
    }
  fi;
#ifdef BUG_UNMARK_REMOVAL_EARLY
  atomic { UNMARK };
#endif
  if :: goto cut :: atomic { MAY_DELETE(S); fragment[S] = 0 } fi;
  if :: goto cut :: atomic { MAY_DELETE(S); data[S] = 0 } fi;
  if :: goto cut :: atomic { UNMARK; LEAVE; goto over } fi;
cut:
  atomic { LEAVE; if :: !again -> again = true; goto removal :: again -> goto over fi };
pinned: /* the marker stays, since another may be at the same removal */
#ifdef BUG_PINNED_UNMARKS
  atomic { UNMARK };
#endif
  skip
}
#endif

#if OTHERS > 0
/* Another job, which sees the tier too: it takes the root over to save there, or it only restores. Then it needs room. */
proctype Other(byte me)
{
  byte a = 0, t = 0;
  bool takes, there, again;
  if :: true :: TIERS == 2 -> t = 1 fi;
  if :: true :: ATTEMPTS == 2 -> a = 1 fi;
  if
  :: atomic { takes = true; owner[t] = ANOTHER }
  :: takes = false
  fi;
  there = manifest[S] || mark[S] == BY_REMOVER; /* what is a checkpoint now; what becomes one later is another's */
  if
  :: takes
#ifdef BUG_UNKNOWN_IS_DEAD
  :: !takes
#else
  :: atomic { !takes && ended[a] == ALL }
  :: atomic { !takes && ended[a] != ALL -> goto over }
#endif
  fi;
  if :: !there -> goto begun :: there fi;
removal:
#ifdef BUG_REMOVE_WITHOUT_TOMBSTONE
  if :: goto over :: atomic { MAY_MARK(BY_REMOVER) -> MARK(BY_REMOVER) } fi;
  atomic { manifest[S] = false; evicted[S] = true };
  atomic { MAY_DELETE(S); fragment[S] = 0 };
  atomic { MAY_DELETE(S); data[S] = 0 };
  atomic { UNMARK; LEAVE };
#else
  remove(!takes || owner[t] == ANOTHER, true);
#endif
  goto over;
begun:
#ifdef BUG_EVICT_BEGUN
  if :: atomic { mark[S] == NONE || mark[S] == BY_JOB -> mark[S] = BY_JOB } :: goto over fi;
  if :: atomic { manifest[S] -> mark[S] = NONE; goto over } :: !manifest[S] fi;
  atomic { MAY_DELETE(S); fragment[S] = 0 };
  atomic { MAY_DELETE(S); data[S] = 0 };
  atomic { mark[S] = NONE };
#endif
over:
  atomic { LEAVE };
end_day:
#ifdef BUG_TOMBSTONE_GOES_EARLY
  tomb[S] = false
#else
  atomic { NOTHING_COMES -> tomb[S] = false }
#endif
}
#endif

#ifdef AGENT
#ifdef DETACH
#define LEFT left[a]
/* The manager of each rank is closed with detach. */
proctype Detach()
{
  byte a = 0;
  if :: true :: ATTEMPTS == 2 -> a = 1 fi;
end:
  atomic { discarding[a] == 0 -> left[a] = true }
}
#else
#define LEFT false
#endif

/* The agent, when the ranks of its node have ended, or have left the job to it. It owns no root. */
proctype Agent(byte me)
{
  byte a = 0, t = 0, r = 0;
  bool again;
  if :: true :: TIERS == 2 -> t = 1 fi;
  if :: true :: ATTEMPTS == 2 -> a = 1 fi;
#ifndef BUG_AGENT_DOES_NOT_WAIT
end:
  (ended[a] & HERE) == HERE || LEFT;
#endif
  if :: owner[t] == a :: goto over fi;
  if
  :: true /* it finishes a save that lacks its manifest */
  :: !manifest[S] -> goto copy /* or copies a step that another tier has */
  :: manifest[S] -> goto removal
  fi;
finishing:
  if :: goto over :: atomic { WHOLE(S) && owner[t] == a } fi; /* and once more behind the marker */
  finish(owner[t] == a);
removal: /* retention, or what is in memory is freed */
  if :: goto over :: ended[a] == ALL fi;
  remove(owner[t] == a, false);
  goto over;
copy: /* the data of each rank, then the fragments */
  do
  :: goto over
  :: atomic { r < RANKS -> data[S] = data[S] | MINE; r++ }
  :: atomic { r == RANKS -> fragment[S] = ALL; r = 0; break }
  od;
  goto finishing;
over:
  atomic { r = 0; LEAVE }
}
#endif

#ifdef NODES
/* The agent of a node with a tier of its own, which has the files of its own ranks alone, and perhaps
   the manifest. */
proctype NodeAgent(byte me; byte mine)
{
  byte a = 0, t = 0, r = 0, bring = mine; /* the ranks whose files it brings */
  if :: true :: TIERS == 2 -> t = 1 fi;
  if :: true :: ATTEMPTS == 2 -> a = 1 fi;
end:
  (ended[a] & mine) == mine;
  if :: goto over :: owner[t] == a fi;
  noted[S] = noted[S] | mine;
#ifdef BUDDY
  do /* it may have copies of any other rank, and lose its patience at any moment */
  :: r == RANKS -> break
  :: atomic { r < RANKS -> r++ }
#ifdef BUG_BRING_WITHOUT_MARK
  :: atomic { r < RANKS -> bring = bring | MINE; brought[S] = brought[S] | MINE; r++ }
#else
  :: atomic { r < RANKS && (removes[S] & MINE) == 0 -> bring = bring | MINE; brought[S] = brought[S] | MINE; r++ }
#endif
  od;
end_settled:
  (noted[S] | brought[S]) == ALL;
  r = 0;
#else
#ifndef BUG_COPY_WITHOUT_NOTES
end_notes:
  noted[S] == ALL;
#endif
#endif
  if :: manifest[S] -> goto over :: !manifest[S] fi;
  if :: goto over :: atomic { data[S] = data[S] | bring } fi;
  if :: goto over :: owner[t] == a fi;
  if :: goto over :: atomic { fragment[S] = fragment[S] | bring } fi;
end_parts: /* of the other nodes */
  if :: goto over :: atomic { WHOLE(S) && owner[t] == a } fi;
  finish(owner[t] == a);
over:
  atomic { LEAVE }
}
#endif

#ifdef PINNER
/* A reader: it pins, looks, reads, and perhaps replaces its pin by a later one. */
proctype Pinner()
{
  byte a = 0, t = 0;
  if :: true :: TIERS == 2 -> t = 1 fi;
  if :: true :: ATTEMPTS == 2 -> a = 1 fi;
  pins[S] = pins[S] | 1;
#ifndef BUG_PIN_WITHOUT_LOOK
  if :: mark[S] == BY_REMOVER -> goto over :: mark[S] != BY_REMOVER fi;
#endif
  if :: !manifest[S] -> goto over :: atomic { manifest[S] -> held[S] = 1 } fi;
  if :: goto over :: true fi;
#ifdef BUG_RENEW_WITHOUT_OVERLAP
  pins[S] = pins[S] & 2;
  pins[S] = pins[S] | 2;
#else
  pins[S] = pins[S] | 2;
#endif
  atomic { assert(manifest[S]); held[S] = 3 };
  if :: goto over :: atomic { held[S] = 2; pins[S] = pins[S] & 2 } fi;
over: /* a pin ends by itself at some time */
  held[S] = 0;
  if :: pins[S] = 0 :: true fi
}
#endif

/* What is on its way arrives at some time, once or twice. */
proctype Network()
{
  byte a = 0, t = 0;
end:
  do
  :: atomic { late_fragment[0] != 0 -> fragment[0] = fragment[0] | late_fragment[0]; late_fragment[0] = 0 }
  :: atomic { late_manifest[0] -> if :: !manifest[0] && !tomb[0] -> APPEAR(0) :: else fi; if :: late_manifest[0] = false :: true fi }
#if ATTEMPTS * TIERS > 1
  :: atomic { late_fragment[1] != 0 -> fragment[1] = fragment[1] | late_fragment[1]; late_fragment[1] = 0 }
  :: atomic { late_manifest[1] -> if :: !manifest[1] && !tomb[1] -> APPEAR(1) :: else fi; late_manifest[1] = false }
  :: atomic { late_fragment[2] != 0 -> fragment[2] = fragment[2] | late_fragment[2]; late_fragment[2] = 0 }
  :: atomic { late_manifest[2] -> if :: !manifest[2] && !tomb[2] -> APPEAR(2) :: else fi; late_manifest[2] = false }
  :: atomic { late_fragment[3] != 0 -> fragment[3] = fragment[3] | late_fragment[3]; late_fragment[3] = 0 }
  :: atomic { late_manifest[3] -> if :: !manifest[3] && !tomb[3] -> APPEAR(3) :: else fi; late_manifest[3] = false }
#endif
  od
}

#ifdef PRUNER
/* What a job has left that ended long ago. */
proctype Pruner(byte me)
{
  byte a = 0, t = 0;
end:
  ended[a] == ALL && late_fragment[S] == 0 && !late_manifest[S];
  if :: atomic { !manifest[S] } :: goto over fi;
  if :: atomic { MAY_MARK(BY_JOB) -> MARK(BY_JOB) } :: goto over fi;
  if :: atomic { manifest[S] -> UNMARK; goto over } :: !manifest[S] fi;
  atomic { MAY_DELETE(S); fragment[S] = 0 };
  atomic { MAY_DELETE(S); data[S] = 0 };
  atomic { UNMARK };
over:
  atomic { LEAVE }
}
#endif

#ifdef STORE_GOES
proctype Fire() { gone[0] = true }
#endif

init {
  atomic {
    owner[0] = 0; owner[1] = 0;
#ifdef ABORTED
    intent[0] = REFUSE; outcome[0] = REFUSED;
    if :: data[0] = ALL :: data[0] = 3 fi;
    if :: fragment[0] = ALL :: fragment[0] = 3 :: fragment[0] = 3; late_fragment[0] = 4 fi;
#endif
#ifdef SAVED
    ended[0] = ALL;
    if :: true :: owner[0] = ANOTHER fi;
    if :: data[0] = ALL :: data[0] = 3 fi;
    if :: fragment[0] = ALL :: fragment[0] = 3 :: fragment[0] = 3; late_fragment[0] = 4 fi;
    if
    :: true
    :: mark[0] = BY_JOB
    :: WHOLE(0) -> mark[0] = BY_FINISHER
    :: WHOLE(0) -> manifest[0] = true
    :: WHOLE(0) -> late_manifest[0] = true
    fi;
#else
    run Rank(0, 0); run Rank(0, 1); run Rank(0, 2);
#if ATTEMPTS == 2
    run Rank(1, 0); run Rank(1, 1); run Rank(1, 2);
#endif
#endif
    run Network();
#if OTHERS > 0
    run Other(16);
#endif
#if OTHERS > 1
    run Other(32);
#endif
#if FINISHERS > 0
    run Finisher(1);
#endif
#if FINISHERS > 1
    run Finisher(2);
#endif
#ifdef AGENT
    run Agent(4);
#ifdef DETACH
    run Detach();
#endif
#endif
#ifdef NODES
#ifdef BUDDY
    run NodeAgent(4, 1); run NodeAgent(64, 6);
#else
    run NodeAgent(4, 3); run NodeAgent(64, 4);
#endif
#endif
#ifdef PINNER
    run Pinner();
#endif
#ifdef PRUNER
    run Pruner(8);
#endif
#ifdef STORE_GOES
    run Fire();
#endif
  }
}
