//! The threads of a team: distribution of a loop, and waiting.
//!
//! A loop is published by giving each thread its range of indices. A thread claims an index by a compare-and-swap on a
//! range, first its own, then those of others, and may use the loop's task until it has reported the index as done. The
//! loop ends when all indices are done; threads without a claim are not waited for. A range is one word, so a claim
//! always belongs to the running loop without a loop number.

use std::any::Any;
use std::cell::UnsafeCell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// Time that a thread spins for the next loop, or the end of one, before it sleeps. The ops of a step follow each other
/// within microseconds, and waking a sleeping thread takes about 30 us.
pub(super) const SPIN: Duration = Duration::from_micros(50);

/// A value in its own cache lines: two of them, because the prefetcher fetches pairs.
#[repr(align(128))]
struct Padded<T>(T);

/// State of one thread of a team.
struct Slot {
    /// Unclaimed indices: start in the lower half, end in the upper half.
    range: AtomicU64,
    /// True if the thread sleeps or is about to.
    asleep: AtomicBool,
    /// The thread, once it runs.
    thread: OnceLock<Thread>,
}

/// The task of the running loop, borrowed: valid until the last index is done.
type Task = *const (dyn Fn(usize) + Sync);

/// State of a team.
pub(super) struct Shared {
    /// One slot per thread; the first belongs to the thread that starts the loop.
    slots: Box<[Padded<Slot>]>,
    /// True while a thread runs a loop.
    busy: AtomicBool,
    task: UnsafeCell<Option<Task>>,
    /// Number of indices of the loop that are not done.
    left: Padded<AtomicUsize>,
    /// True if the thread that started the loop sleeps until its end, or is about to.
    caller_asleep: AtomicBool,
    ended: (Mutex<()>, Condvar),
    /// Payload of the first panic of the loop.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stopped: AtomicBool,
}

// SAFETY: `task` is written by the thread that holds `busy` while no index is claimable, and read by threads that hold
// an index; the range's release and acquire order the two.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} threads", self.threads())
    }
}

impl Shared {
    pub(super) fn new(threads: usize) -> Self {
        let slot = || Slot { range: AtomicU64::new(0), asleep: AtomicBool::new(false), thread: OnceLock::new() };
        Self {
            slots: (0..threads).map(|_| Padded(slot())).collect(),
            busy: AtomicBool::new(false),
            task: UnsafeCell::new(None),
            left: Padded(AtomicUsize::new(0)),
            caller_asleep: AtomicBool::new(false),
            ended: (Mutex::new(()), Condvar::new()),
            panic: Mutex::new(None),
            stopped: AtomicBool::new(false),
        }
    }

    pub(super) fn threads(&self) -> usize {
        self.slots.len()
    }

    /// Runs a loop. Returns false without doing anything if the team is a single thread or busy, or the loop is too
    /// long.
    pub(super) fn run(&self, count: usize, task: &(dyn Fn(usize) + Sync)) -> bool {
        if self.threads() == 1 || count > u32::MAX as usize || self.busy.swap(true, Ordering::Acquire) {
            return false;
        }
        // SAFETY: extends the lifetime; this function returns when the last index is done.
        let task: Task =
            unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(task) };
        // SAFETY: this thread holds `busy`, and no index can be claimed now.
        unsafe { *self.task.get() = Some(task) };
        self.left.0.store(count, Ordering::Relaxed);
        for (i, slot) in self.slots.iter().enumerate() {
            let bound = |i: usize| (count * i).div_ceil(self.threads()) as u64;
            slot.0.range.store(bound(i) | bound(i + 1) << 32, Ordering::Release);
        }
        self.wake();
        self.take_part(0);
        self.wait_for_end();
        let panic = self.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.busy.store(false, Ordering::Release);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
        true
    }

    /// Wakes the threads that sleep and have a range.
    fn wake(&self) {
        // Either this thread sees that another one sleeps, or that one sees its range first.
        fence(Ordering::SeqCst);
        for Padded(slot) in &self.slots[1..] {
            if slot.asleep.load(Ordering::Relaxed)
                && let Some(thread) = slot.thread.get()
            {
                thread.unpark();
            }
        }
    }

    /// Claims and runs indices until there are none, first those of slot `own`.
    fn take_part(&self, own: usize) {
        let mut done = 0;
        for i in 0..self.threads() {
            let slot = &self.slots[(own + i) % self.threads()].0;
            while let Some(index) = slot.claim() {
                // SAFETY: an index is claimed and not reported as done, so the loop has not ended.
                let task = unsafe { (*self.task.get()).map(|task| &*task) };
                let ran = catch_unwind(AssertUnwindSafe(|| task.into_iter().for_each(|task| task(index))));
                if let Err(payload) = ran {
                    self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(payload);
                }
                done += 1;
            }
        }
        // `SeqCst`, here and in `wait_for_end`: either this thread sees that the caller sleeps, or the caller sees the
        // end.
        if done > 0
            && self.left.0.fetch_sub(done, Ordering::SeqCst) == done
            && self.caller_asleep.load(Ordering::SeqCst)
        {
            let _locked = self.ended.0.lock().unwrap_or_else(PoisonError::into_inner);
            self.ended.1.notify_all();
        }
    }

    /// Waits until every index is done.
    fn wait_for_end(&self) {
        if spin_until(|| self.left.0.load(Ordering::Acquire) == 0) {
            return;
        }
        self.caller_asleep.store(true, Ordering::SeqCst);
        let mut locked = self.ended.0.lock().unwrap_or_else(PoisonError::into_inner);
        while self.left.0.load(Ordering::SeqCst) > 0 {
            locked = self.ended.1.wait(locked).unwrap_or_else(PoisonError::into_inner);
        }
        self.caller_asleep.store(false, Ordering::SeqCst);
    }

    /// Main loop of thread `own`.
    pub(super) fn work(&self, own: usize) {
        let slot = &self.slots[own].0;
        slot.thread.get_or_init(thread::current);
        let is_due = || slot.is_claimable() || self.stopped.load(Ordering::Relaxed);
        loop {
            if !spin_until(is_due) {
                slot.asleep.store(true, Ordering::Relaxed);
                fence(Ordering::SeqCst); // see `wake`
                while !is_due() {
                    thread::park();
                }
                slot.asleep.store(false, Ordering::Relaxed);
            }
            if self.stopped.load(Ordering::Acquire) {
                return;
            }
            self.take_part(own);
        }
    }

    /// Makes `threads` return from [`work`](Self::work).
    pub(super) fn stop<'a>(&self, threads: impl Iterator<Item = &'a Thread>) {
        self.stopped.store(true, Ordering::SeqCst);
        threads.for_each(Thread::unpark);
    }
}

impl Slot {
    fn is_claimable(&self) -> bool {
        is_claimable(self.range.load(Ordering::Relaxed))
    }

    /// Takes the first index of the range.
    fn claim(&self) -> Option<usize> {
        let next = |range: u64| is_claimable(range).then_some(range + 1);
        let claimed = self.range.fetch_update(Ordering::Acquire, Ordering::Relaxed, next);
        claimed.ok().map(|range| range as u32 as usize)
    }
}

/// True if a range holds an index.
fn is_claimable(range: u64) -> bool {
    (range as u32) < (range >> 32) as u32
}

/// Spins until `is_done`, for at most [`SPIN`]; returns its last result.
fn spin_until(is_done: impl Fn() -> bool) -> bool {
    /// Number of spins between two reads of the clock.
    const LOOKS: usize = 32;
    let mut start = None;
    loop {
        for _ in 0..LOOKS {
            if is_done() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.get_or_insert_with(Instant::now).elapsed() > SPIN {
            return false;
        }
    }
}
