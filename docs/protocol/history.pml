/* The rollbacks of ckpt as a model for Spin. Prose: docs/protocol.md. Code: ckpt/restore/branch.py, ckpt/model/rollback.py, ckpt/catalog/{candidates,rollbacks}.py, ckpt/save/{ledger,tier_writer}.py.

   A run has a first step, which both tiers list. Jobs of two ranks follow each other: each restores the newest step, saves some steps, goes back to any listed step, also an abandoned one, and saves
   again; or it goes back at once. The leader saves in the background, so a save of the old branch may be written when the new one has begun. What a rank writes is the step that its state comes from,
   so the parts of a step tell their history. The job may die at any moment; a rank that dies before the others is one that does nothing more until then. A rollback or a manifest that the leader was
   putting may arrive at any later time. The farther tier may not answer: it then misses a rollback or a save, or is left out of a listing.

   Claims, as assertions:
   1. All parts of a listed step have one history.
   2. Whoever lists both tiers takes for the newest step that of the branch that the record with the highest number has begun, as the tree of all steps tells it.
   3. Whoever sees one tier alone takes no abandoned step there, once the tier lists a step of the branch.

   How a step becomes a checkpoint, and what two jobs at one time may do, is the matter of commit.pml. Here a step is listed when its ranks have written it and the leader says so, or by the restore of
   the next job. Assumed, as docs/decisions/0033 says: the farther tier answers a listing if it alone has the record that counts. If a record arrives late, and its number is given to another one by
   then, a tier that has the late one is excepted from claim 3.

   -DJOBS=n -DSTEPS=n. Each -DBUG_... breaks one rule on purpose. */

#ifndef JOBS
#define JOBS 2
#endif
#ifndef STEPS
#define STEPS 2
#endif
#define TRIALS 2 /* of one job: before and after it goes back */
#define REFS (1 + JOBS * TRIALS * STEPS)
#define ROLLBACKS (JOBS + 1)
#define NEAR 0
#define FAR 1
#define LEADER 0

/* An attempt at a step: of a job, of its trial. The first step of the run is 0. */
#define REF(job, trial, step) (((job) * TRIALS + (trial)) * STEPS + (step))
#define STEP(ref) ((ref) == 0 -> 0 : ((ref) - 1) % STEPS + 1)
#define JOB(ref) (((ref) - 1) / (TRIALS * STEPS))
#define TRIAL(ref) (((ref) - 1) / STEPS % TRIALS)
#define BIT(number) (1 << (number))
#define HAS(set, number) (((set) & BIT(number)) != 0)

/* the tiers: sets of attempts */
int listed[2], part[4]; /* with a manifest; with the files of a rank */
int late[2]; /* whose manifest may come at any time, from a leader that has died */
byte slot[2 * ROLLBACKS]; /* the record of each number, from 1 on */
byte late_record[2];
#define PART(tier, rank) part[(tier) * 2 + (rank)]
#define WHOLE(tier) (PART(tier, 0) & PART(tier, 1))
#define BEGUN(tier) (PART(tier, 0) | PART(tier, 1) | 1)
#define SLOT(tier, number) slot[(tier) * ROLLBACKS + (number)]

/* the records, in the order of their making */
typedef Record {
  byte number, target, author, first; /* who made it, and the trial that it went on with */
  byte jobs; /* that it names */
  int keep, later /* attempts on the branch; and those of them that it says began later */
};
Record record[ROLLBACKS];
byte records;

/* the tree, for the claims */
byte source[2 * REFS]; /* by rank */
int line[REFS]; /* an attempt and all that it comes from */
bool conflict[2];

/* what the leader does now */
#define IDLE 12 /* before the first job */
#define LISTS 0
#define CHOOSES 1
#define SHARES 2
#define TRAINS 3
#define LISTS_AGAIN 4
#define LOOKS_FAR 5
#define WANTS 6
#define GOES_BACK 7
#define PUTS 8
#define PUTS_NEAR 9
#define PUTS_FAR 10
#define HANGS 11 /* until the job dies, while it puts a record */

/* the job of now: all of it is gone when the job dies */
byte job, before, stage = IDLE;
byte at[2], saves[2], trial[2], queue[2], comes_from[2]; /* by rank */
byte chosen, target; /* what the leader tells, plus one each */
bool branched[2], answered, follows, calls;
byte known, rollback, number, counted;
int heads, candidates;
byte tier, phase; /* of what the leader saves in the background */

byte i, p, e, c, arrived; /* of single steps */
int pool;

/* Say in `result` which of `pool` is the newest: the highest step, and of two the later attempt. Only those count that a record says are on the branch. */
inline newest(which, result)
{
  if :: which != 0 -> pool = pool & record[which].keep :: else fi;
  result = 0; i = 1;
  do
  :: i < REFS && HAS(pool, i) && (STEP(i) > STEP(result) || (STEP(i) == STEP(result) && i > result)) -> result = i; i++
  :: i < REFS && !(HAS(pool, i) && (STEP(i) > STEP(result) || (STEP(i) == STEP(result) && i > result))) -> i++
  :: i == REFS -> break
  od
}

#define IS_KEPT(which, ref) ((which) == 0 || HAS(record[which].keep, ref))

/* Say in `result` which record of a tier counts, if it counts more than `result` does. */
inline last_of(tier, result)
{
  i = 1;
  do
  :: i < ROLLBACKS && SLOT(tier, i) != 0 && (result == 0 || record[SLOT(tier, i)].number > record[result].number ||
       (record[SLOT(tier, i)].number == record[result].number && SLOT(tier, i) > result)) -> result = SLOT(tier, i); i++
  :: i < ROLLBACKS && !(SLOT(tier, i) != 0 && (result == 0 || record[SLOT(tier, i)].number > record[result].number ||
       (record[SLOT(tier, i)].number == record[result].number && SLOT(tier, i) > result))) -> i++
  :: i == ROLLBACKS -> break
  od
}

/* The same for a reader that has listed the nearer tier, and then the farther one. */
inline last_of_both(result)
{
#ifdef BUG_NEAREST_RECORD
  if :: result == 0 -> last_of(FAR, result) :: else fi
#else
  last_of(FAR, result)
#endif
}

/* The truth: what was saved after a rollback, and what its target comes from. */
#define AFTER(ref, number) ((ref) != 0 && (JOB(ref) > record[number].author || (JOB(ref) == record[number].author && TRIAL(ref) >= record[number].first)))
#define TRULY_ON(ref, number) ((number) == 0 || AFTER(ref, number) || HAS(line[record[number].target], ref))

inline truth(which, result) /* of `pool` */
{
  result = 0; i = 1;
  do
  :: i < REFS && HAS(pool, i) && TRULY_ON(i, which) && (STEP(i) > STEP(result) || (STEP(i) == STEP(result) && i > result)) -> result = i; i++
  :: i < REFS && !(HAS(pool, i) && TRULY_ON(i, which) && (STEP(i) > STEP(result) || (STEP(i) == STEP(result) && i > result))) -> i++
  :: i == REFS -> break
  od
}

/* Claim 3. */
inline alone(on)
{
  c = 0; last_of(NEAR, c); last_of(FAR, c); /* that counts */
  p = 0; last_of(on, p);
  e = p; pool = listed[on]; newest(e, p); /* that the reader takes */
  e = 0; i = 1;
  do
  :: i < REFS && c != 0 && HAS(listed[on], i) && AFTER(i, c) -> e = 1; i++
  :: i < REFS && !(c != 0 && HAS(listed[on], i) && AFTER(i, c)) -> i++
  :: i == REFS -> break
  od;
  assert(conflict[on] || e == 0 || TRULY_ON(p, c));
  p = 0; e = 0; c = 0; i = 0; pool = 0
}

/* Claim 1, at the time when the manifest of `ref` appears. */
#define SOURCE(rank, ref) source[(rank) * REFS + (ref)]
inline list(on, ref)
{
  assert(SOURCE(0, ref) == SOURCE(1, ref));
  listed[on] = listed[on] | BIT(ref);
  late[on] = late[on] & ~BIT(ref)
}

/* Put a record on a tier, unless the tier has it. */
inline put(on, which)
{
  if
  :: SLOT(on, record[which].number) == 0 -> SLOT(on, record[which].number) = which
  :: SLOT(on, record[which].number) == which
  :: else -> conflict[on] = true
  fi
}

/* A tier that was away gets the record. */
inline share(on)
{
  if :: known != 0 -> put(on, known) :: else fi
}

/* The record of a rollback to `to`: see ckpt.model.rollback.roll_back. It is 0 if `to` is the newest step already. */
inline roll_back(to)
{
  number = 0; p = 0; e = 0; i = 1;
  do /* which jobs are named, and whether a step of the branch is later, or another checkpoint of the same number */
  :: i < REFS ->
    if
    :: HAS(heads, i) ->
      e = e | BIT(JOB(i));
      p = p | (IS_KEPT(rollback, i) && (STEP(i) > STEP(to) || (STEP(i) == STEP(to) && i != to && HAS(candidates, i))))
    :: else
    fi;
    i++
  :: i == REFS -> break
  od;
  if :: rollback != 0 -> e = e | record[rollback].jobs :: else fi;
  if :: trial[LEADER] != 0 -> e = e | BIT(job) :: else fi;
  if
  :: p || !IS_KEPT(rollback, to) ->
    p = rollback; c = 0; /* from p on, and no more from c on */
    do /* the last branch that had `to` */
    :: p != 0 && !HAS(record[p].keep, to) ->
      c = p; i = record[p].number - 1;
      if
      :: i == 0 -> p = 0
      :: else -> p = (SLOT(NEAR, i) > SLOT(FAR, i) -> SLOT(NEAR, i) : SLOT(FAR, i))
      fi
    :: else -> break
    od;
    records++;
    number = records;
    record[number].number = (rollback == 0 -> 1 : record[rollback].number + 1);
    record[number].target = to;
    record[number].author = job;
    record[number].first = trial[LEADER];
    record[number].jobs = e;
    record[number].keep = 1;
    i = 1;
    do
    :: i < REFS ->
      if
      :: !HAS(e, JOB(i)) -> record[number].later = record[number].later | BIT(i)
#ifndef BUG_OWN_TRIAL_UNSAID
      :: HAS(e, JOB(i)) && JOB(i) == job && TRIAL(i) >= trial[LEADER] -> record[number].later = record[number].later | BIT(i)
#endif
      :: else ->
        if
        :: !(c != 0 && HAS(record[c].later, i)) && IS_KEPT(p, i) && (STEP(i) < STEP(to) || i == to) ->
          record[number].keep = record[number].keep | BIT(i)
        :: else
        fi
      fi;
      i++
    :: i == REFS -> break
    od;
    record[number].keep = record[number].keep | record[number].later
  :: else
  fi;
  p = 0; e = 0; c = 0; i = 0
}

#define SAVES(rank) STEP(at[rank]) < STEPS && queue[rank] == 0 && (branched[rank] || saves[rank] < before)
inline save(rank)
{
  queue[rank] = REF(job, trial[rank], STEP(at[rank]) + 1);
  comes_from[rank] = at[rank];
  at[rank] = queue[rank];
  saves[rank]++
}

/* A rank goes back by a call of its program. The trial is one that the job has not used. */
#define CALLS(rank) !branched[rank] && (saves[rank] == before || STEP(at[rank]) == STEPS)
inline branch(rank)
{
#ifndef BUG_SAME_TRIAL
  trial[rank] = (saves[rank] > 0 -> 1 : 0);
#endif
  branched[rank] = true
}

inline write(on, rank)
{
  SOURCE(rank, queue[rank]) = comes_from[rank];
  line[queue[rank]] = line[comes_from[rank]] | BIT(queue[rank]);
  PART(on, rank) = PART(on, rank) | BIT(queue[rank])
}

/* The leader lists the nearer tier, and what it has under way. */
inline look_near()
{
  heads = BEGUN(NEAR);
  if :: queue[LEADER] != 0 -> heads = heads | BIT(queue[LEADER]) :: else fi; /* it may not have begun on any tier */
  candidates = listed[NEAR];
  rollback = 0; last_of(NEAR, rollback);
  counted = rollback; last_of(FAR, counted); i = 0
}

inline look_far()
{
  heads = heads | BEGUN(FAR);
  candidates = candidates | listed[FAR];
  last_of_both(rollback);
  i = 0
}

/* Claim 2: of two records, that counts which has the higher number, and the younger one of those. */
#define COUNTS_AS_MUCH(a, b) ((b) == 0 || ((a) != 0 && (record[a].number > record[b].number || (record[a].number == record[b].number && (a) >= (b)))))
inline choose()
{
  assert(COUNTS_AS_MUCH(rollback, counted));
  pool = candidates; newest(rollback, at[LEADER]);
  pool = candidates; truth(rollback, p);
  assert(at[LEADER] == p);
  if
  :: !HAS(listed[NEAR] | listed[FAR], at[LEADER]) -> list(NEAR, at[LEADER]) /* the restore finishes the commit */
  :: else
  fi;
  chosen = at[LEADER] + 1;
  known = rollback;
  share(NEAR);
  heads = 0; candidates = 0; rollback = 0; counted = 0; p = 0; i = 0; pool = 0
}

inline go_back()
{
  known = rollback;
  share(NEAR);
  roll_back(at[LEADER]);
  target = at[LEADER] + 1;
  heads = 0; candidates = 0; rollback = 0; counted = 0;
  if
  :: number == 0 -> answered = true; stage = TRAINS
  :: else -> stage = PUTS
  fi
}

#define DONE known = number; number = 0; answered = true; stage = TRAINS
#define FAR_MAY_BE_AWAY COUNTS_AS_MUCH(rollback, counted)
#define WANT(ref) :: d_step { stage == WANTS && (ref) < REFS && HAS(candidates, ref) -> at[LEADER] = ref; stage = GOES_BACK }

active proctype Leader()
{
end:
  do
  :: d_step { stage == LISTS -> look_near(); candidates = candidates | WHOLE(NEAR); stage = CHOOSES }
  :: d_step { stage == LISTS && before == 0 -> chosen = 1; branch(LEADER); stage = LISTS_AGAIN } /* it goes back at once */
  :: d_step { stage == CHOOSES -> look_far(); choose(); share(FAR); stage = TRAINS }
  :: d_step { stage == CHOOSES && FAR_MAY_BE_AWAY -> choose(); stage = TRAINS }
  :: d_step { stage == TRAINS && SAVES(LEADER) -> save(LEADER) }
  :: d_step { stage == TRAINS && CALLS(LEADER) -> branch(LEADER); stage = LISTS_AGAIN }
  :: d_step { stage == LISTS_AGAIN -> look_near(); stage = LOOKS_FAR }
  :: d_step { stage == LOOKS_FAR -> look_far(); stage = WANTS }
  :: d_step { stage == LOOKS_FAR && FAR_MAY_BE_AWAY -> stage = WANTS }
  WANT(0) WANT(1) WANT(2) WANT(3) WANT(4) WANT(5) WANT(6) WANT(7) WANT(8) WANT(9) WANT(10) WANT(11) WANT(12)
  :: d_step { stage == GOES_BACK -> go_back() }
  /* the puts have no order, the farther tier may not answer, and a put of a dead leader may arrive later */
  :: d_step { stage == PUTS -> put(NEAR, number); stage = PUTS_FAR }
  :: d_step { stage == PUTS -> put(FAR, number); stage = PUTS_NEAR }
  :: d_step { stage == PUTS_NEAR -> put(NEAR, number); DONE }
  :: d_step { stage == PUTS_FAR -> put(FAR, number); DONE }
  :: d_step { stage == PUTS_FAR -> DONE }
  :: d_step { stage == PUTS || stage == PUTS_NEAR -> late_record[NEAR] = number; stage = HANGS }
  :: d_step { stage == PUTS || stage == PUTS_FAR -> late_record[FAR] = number; stage = HANGS }
  od
}

/* The other rank. That it saves late is that it calls late. */
active proctype Follower()
{
end:
  do
#ifdef BUG_RANKS_CHOOSE
  :: d_step { chosen != 0 && !follows -> pool = listed[NEAR]; newest(known, p); at[1] = p; p = 0; pool = 0; i = 0; follows = true }
#else
  :: d_step { chosen != 0 && !follows -> at[1] = chosen - 1; follows = true }
#endif
  :: d_step { follows && SAVES(1) && !calls -> save(1); write(NEAR, 1); write(FAR, 1); queue[1] = 0 }
  :: d_step { follows && CALLS(1) -> branch(1); calls = true }
  :: d_step { calls && answered -> at[1] = target - 1; calls = false }
  od
}

/* What the leader saves in the background. It puts the record before its own files. The farther tier may not answer. */
#define NEXT_TIER tier = (tier == NEAR -> FAR : NEAR); queue[LEADER] = (tier == FAR -> queue[LEADER] : 0)
#ifdef BUG_RECORD_AFTER_SAVE
#define BEFORE 0
#define AFTERWARDS phase = 1
#else
#define BEFORE 1
#define AFTERWARDS NEXT_TIER; phase = 0
#endif
#define NOWHERE 2 /* it dies while it puts the manifest */
active proctype Writer()
{
end:
  do
#ifdef BUG_RECORD_AFTER_SAVE
  :: d_step { phase == 1 -> share(tier); NEXT_TIER; phase = 0 }
#else
  :: d_step { queue[LEADER] != 0 && phase == 0 -> share(tier); phase = 1 }
#endif
  :: d_step { queue[LEADER] != 0 && phase == BEFORE && HAS(PART(tier, 1), queue[LEADER]) -> write(tier, LEADER); list(tier, queue[LEADER]); AFTERWARDS }
  :: d_step { queue[LEADER] != 0 && phase == BEFORE && HAS(PART(tier, 1), queue[LEADER]) ->
      write(tier, LEADER);
      late[tier] = late[tier] | BIT(queue[LEADER]);
      phase = NOWHERE
    }
  :: d_step { queue[LEADER] != 0 && phase == BEFORE && !HAS(PART(tier, 1), queue[LEADER]) -> write(tier, LEADER); AFTERWARDS } /* the other rank does not write in time */
  :: d_step { queue[LEADER] != 0 && phase == 0 && tier == FAR -> NEXT_TIER } /* it does not answer */
  od
}

/* What a dead leader was putting arrives at some time. */
#define ARRIVES(on, ref) :: (ref) < REFS && HAS(late[on], ref) -> arrived = ref
#define ARRIVE(on) ARRIVES(on, 1) ARRIVES(on, 2) ARRIVES(on, 3) ARRIVES(on, 4) ARRIVES(on, 5) ARRIVES(on, 6) \
  ARRIVES(on, 7) ARRIVES(on, 8) ARRIVES(on, 9) ARRIVES(on, 10) ARRIVES(on, 11) ARRIVES(on, 12)
active proctype Network()
{
end:
  do
  :: d_step { late_record[NEAR] != 0 -> put(NEAR, late_record[NEAR]); late_record[NEAR] = 0 }
  :: d_step { late_record[FAR] != 0 -> put(FAR, late_record[FAR]); late_record[FAR] = 0 }
  :: atomic { late[NEAR] != 0 -> if ARRIVE(NEAR) fi; skip; d_step { list(NEAR, arrived); arrived = 0 } }
  :: atomic { late[FAR] != 0 -> if ARRIVE(FAR) fi; skip; d_step { list(FAR, arrived); arrived = 0 } }
  od
}

/* A job dies, and the next one starts. It saves so many steps before it goes back. */
#define NEXT(saves_before) :: d_step { job + 1 < JOBS -> new_job(); before = saves_before }
inline new_job()
{
  job++; stage = LISTS;
  at[0] = 0; saves[0] = 0; trial[0] = 0; queue[0] = 0; comes_from[0] = 0; branched[0] = false;
  at[1] = 0; saves[1] = 0; trial[1] = 0; queue[1] = 0; comes_from[1] = 0; branched[1] = false;
  chosen = 0; target = 0; answered = false; follows = false; calls = false;
  known = 0; rollback = 0; number = 0; counted = 0; heads = 0; candidates = 0;
  tier = NEAR; phase = 0
}

init {
  atomic {
    listed[NEAR] = 1; listed[FAR] = 1; line[0] = 1; stage = LISTS;
    if :: before = 0 :: before = STEPS fi
  };
end:
  do
  NEXT(0) NEXT(STEPS)
  :: d_step { true -> /* anybody may list the tiers now */
      alone(NEAR);
      alone(FAR);
      c = 0; last_of(NEAR, c); last_of_both(c);
      pool = listed[NEAR] | listed[FAR]; newest(c, p);
      c = 0; last_of(NEAR, c); last_of(FAR, c);
      pool = listed[NEAR] | listed[FAR]; truth(c, e);
      assert(p == e); /* claim 2 */
      p = 0; e = 0; c = 0; pool = 0; i = 0
    }
  od
}
