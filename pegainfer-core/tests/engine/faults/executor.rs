//! The simulated device under a virtual clock, with the faults that the world orders.

use crate::device::Device;
use crate::kinds::{InPlace, Kind, KvOnly, Recurrent, StepOf};
use crate::requests::mix;
use pegainfer_core::engine::{
    Clock, EngineHandle, GenerateRequest, RequestId, SimulatedClock, SubmitError, TokenStream,
};
use pegainfer_core::grammar::MaskSignal;
use pegainfer_core::kv::NO_SLOT;
use pegainfer_core::schedule::{Graphs, NO_STATE, Outcome, Segment, Step, StepExecutor};
use pegainfer_core::tensor::OpError;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// Rows of the largest graph that a device would have; no world has more sequences.
const GRAPH_ROWS: usize = 8;
/// Fixed part of a step's time.
const STEP_TIME: Duration = Duration::from_micros(20);
const TOKEN_TIME: Duration = Duration::from_micros(1);
/// Factor of a slow step's time.
const SLOW: u32 = 1000;

/// A kind of model whose state can be corrupted.
pub trait Spoil: Kind {
    /// Simulates a step that failed half-way: writes garbage to every slot that it writes.
    fn spoil(&mut self, step: &StepOf<Self>);
}

impl Spoil for KvOnly {
    fn spoil(&mut self, _step: &Step) {}
}

impl Spoil for Recurrent {
    fn spoil(&mut self, step: &Step<Segment>) {
        written(step).for_each(|slot| self.slots[slot] = mix(!self.slots[slot]));
    }
}

impl Spoil for InPlace {
    fn spoil(&mut self, step: &Step<Segment>) {
        for slot in written(step) {
            self.slots[slot].iter_mut().for_each(|kept| kept.prefix = mix(!kept.prefix));
        }
    }
}

/// The slots that a step writes.
fn written(step: &Step<Segment>) -> impl Iterator<Item = usize> {
    step.state.iter().filter(|segment| segment.to != NO_STATE).map(|segment| segment.to as usize)
}

/// Faults of the next turn, if there is an occasion.
#[derive(Default)]
pub struct Orders {
    pub launch_fails: bool,
    pub finish_fails: bool,
    /// A failure is for good.
    pub lost: bool,
    pub slow_step: bool,
    pub late_mask: bool,
}

/// Observer of the engine's health while a step runs.
pub struct Watch {
    pub handle: EngineHandle,
    /// Time at which the engine counts as stuck, unless it progresses before.
    pub stuck_at: Instant,
    /// A request that arrives while a step runs, and its result.
    pub request: Option<GenerateRequest>,
    pub submitted: Option<Result<TokenStream, SubmitError>>,
}

/// Runs steps one after the other, each for a time that depends on its tokens; results are known when the step is
/// finished.
pub struct VirtualDevice<K: Kind> {
    device: Device<K>,
    clock: SimulatedClock,
    depth: usize,
    /// Steps in flight, oldest first, and when they end.
    in_flight: VecDeque<(StepOf<K>, Instant)>,
    lost: bool,
    /// Requests and the position from which on the device refuses to compute their tokens.
    pub refused: BTreeMap<RequestId, usize>,
    /// Steps that failed because the orders said so.
    pub failures: u64,
    /// The requests of the step that failed last.
    pub failed_rows: Vec<RequestId>,
    pub orders: Orders,
    pub watch: Option<Watch>,
    /// Times that a step was seen to be past its deadline.
    pub seen_stuck: u64,
    /// Calls of `launch`, of `finish` and of `abandon`.
    pub calls: u64,
}

impl<K: Kind> VirtualDevice<K>
where
    StepOf<K>: Send,
{
    pub fn new(device: Device<K>, clock: SimulatedClock, depth: usize) -> Self {
        Self {
            device,
            clock,
            depth,
            in_flight: VecDeque::new(),
            lost: false,
            refused: BTreeMap::new(),
            failures: 0,
            failed_rows: Vec::new(),
            orders: Orders::default(),
            watch: None,
            seen_stuck: 0,
            calls: 0,
        }
    }

    /// True if a failure was fatal.
    pub fn is_lost(&self) -> bool {
        self.lost
    }

    /// The steps in flight.
    pub fn in_flight(&self) -> impl Iterator<Item = &StepOf<K>> {
        self.in_flight.iter().map(|(step, _)| step)
    }

    /// Waits until a step ends. Meanwhile health follows its deadline to the nanosecond.
    fn wait_until(&mut self, end: Instant) {
        let Some(Watch { handle, stuck_at, request, submitted }) = &mut self.watch else {
            return self.clock.advance_to(end);
        };
        *submitted = request.take().map(|request| handle.submit(request));
        if end >= *stuck_at {
            self.clock.advance_to(*stuck_at - Duration::from_nanos(1));
            assert_eq!(handle.is_healthy(), self.clock.now() < *stuck_at, "before the deadline of the step");
            self.clock.advance_to(*stuck_at);
            assert!(!handle.is_healthy(), "a step is past its deadline and nobody says so");
            self.seen_stuck += 1;
        }
        self.clock.advance_to(end);
        assert_eq!(handle.is_healthy(), self.clock.now() < *stuck_at, "after {:?}", STEP_TIME);
    }
}

impl<K: Spoil> VirtualDevice<K> {
    /// Garbage wherever the step writes.
    fn spoil(&mut self, step: &StepOf<K>) {
        for slot in step.slots.iter().filter(|slot| **slot != NO_SLOT) {
            self.device.kv[*slot as usize] = mix(u64::from(*slot) ^ 0xBAD);
        }
        self.device.states.spoil(step);
    }

    fn fail(&mut self, op: &'static str, step: &StepOf<K>) -> OpError {
        self.failures += 1;
        self.lost |= self.orders.lost;
        self.error(op, step, "out of order")
    }

    fn error(&mut self, op: &'static str, step: &StepOf<K>, message: &str) -> OpError {
        self.spoil(step);
        self.failed_rows = step.rows.iter().map(|row| row.id).collect();
        OpError { op, message: message.into() }
    }

    /// Error of a step with a refused row: half of them at the launch, the others at the end.
    fn refuse(&mut self, at_launch: bool, step: &StepOf<K>) -> Result<(), OpError> {
        let refuses = |from: usize, tokens| from.is_multiple_of(2) == at_launch && tokens > from;
        let row = |id| self.refused.get(&id).copied();
        let is_refused = step.rows.iter().any(|r| row(r.id).is_some_and(|from| refuses(from, r.computed + r.drafts)));
        if is_refused { Err(self.error("embedding", step, "a row is refused")) } else { Ok(()) }
    }
}

impl<K: Spoil + Send + 'static> StepExecutor for VirtualDevice<K> {
    type State = K::State;

    fn useful_depth(&self) -> usize {
        self.depth
    }

    fn launch(&mut self, step: &StepOf<K>) -> Result<(), OpError> {
        self.calls += 1;
        check_graph(step);
        if std::mem::take(&mut self.orders.launch_fails) {
            return Err(self.fail("launch", step));
        }
        self.refuse(true, step)?;
        let slow = if std::mem::take(&mut self.orders.slow_step) { SLOW } else { 1 };
        let begin = self.in_flight.back().map_or(self.clock.now(), |(_, end)| self.clock.now().max(*end));
        let time = (STEP_TIME + TOKEN_TIME * step.tokens.len() as u32) * slow;
        self.in_flight.push_back((step.clone(), begin + time));
        Ok(())
    }

    fn sample(&mut self, step: &StepOf<K>) -> Result<(), OpError> {
        let (newest, _) = self.in_flight.back_mut().expect("a step was launched");
        assert!(!step.is_deferred() && newest.samples.len() == step.samples.len());
        newest.samples.clone_from(&step.samples);
        Ok(())
    }

    fn finish(&mut self) -> Result<Outcome, OpError> {
        self.calls += 1;
        let (step, end) = self.in_flight.pop_front().expect("a step is in flight");
        self.wait_until(end);
        if std::mem::take(&mut self.orders.finish_fails) {
            return Err(self.fail("attention", &step));
        }
        self.refuse(false, &step)?;
        Ok(self.device.run(&step))
    }

    fn abandon(&mut self) -> Result<(), OpError> {
        self.calls += 1;
        for (step, _) in std::mem::take(&mut self.in_flight) {
            self.spoil(&step);
        }
        match self.lost {
            true => Err(OpError { op: "synchronize", message: "the device is lost".into() }),
            false => Ok(()),
        }
    }

    fn clock(&self) -> Clock {
        Clock::Simulated(self.clock.clone())
    }

    fn rest(&mut self, time: Duration) {
        assert!(self.in_flight.is_empty(), "the engine rests with a step in flight");
        self.clock.advance(time);
    }

    fn wait_for_masks(&mut self, masks: &MaskSignal, seen: u64, limit: Duration) {
        let unsampled = self.in_flight.iter().all(|(step, _)| step.is_deferred());
        assert!(self.in_flight.len() <= 1 && unsampled, "the engine waits for a mask and not for a step");
        match self.orders.late_mask {
            true => self.clock.advance(limit),
            false => compute_masks(usize::MAX),
        }
        assert!(self.orders.late_mask || masks.ended() > seen, "the engine waits for no mask");
    }
}

/// Checks that a step in which each sequence computes its newest token runs as a graph, whatever its samples request.
fn check_graph<R: Clone + Default>(step: &Step<R>) {
    let decodes = step.queries() == (1, 1) && step.rows.iter().all(|row| row.next.is_none());
    assert!(!decodes || Graphs::<usize>::new(GRAPH_ROWS).size(step).is_some(), "a decode step without a graph");
}

/// Computes up to `max` pending masks. They belong to a pool with this thread as its only thread, which computes only
/// on demand.
pub fn compute_masks(max: usize) {
    let computed = || rayon::yield_local() == Some(rayon::Yield::Executed);
    for _ in 0..max {
        if !computed() {
            return;
        }
    }
}
