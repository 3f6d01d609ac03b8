//! The faults of a world. Each kind has its own random numbers, so the seed draws the other kinds as before if some are
//! left out.

use crate::requests::{Rng, mix};

/// Kinds of faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A client drops its stream.
    Hangup,
    /// A request gets a deadline, often a past one, and often a second, later one.
    Deadline,
    /// A client reads an event now and then, or none before its request has ended.
    SlowClient,
    /// More requests arrive at one instant than the queue takes.
    Burst,
    /// The handle's owner resets the prefix cache, and sometimes does not wait for it.
    Reset,
    /// The last handle is dropped.
    Drain,
    /// A launch fails.
    LaunchFails,
    /// A step in flight fails.
    FinishFails,
    /// The device does not get over a failure.
    DeviceLost,
    /// A step takes 1,000 times as long as usual.
    SlowStep,
    /// Masks take longer than steps.
    LateMask,
    /// A grammar cannot be followed to the end.
    BrokenMask,
    /// Hours pass between two turns, as in a virtual machine that was suspended.
    ClockJump,
    /// The demultiplexer's thread does not get to run.
    DemuxLag,
    /// The device refuses every step with a row of a given request, from one of its tokens on.
    RefusedRow,
}

impl Fault {
    /// All kinds and their names in PEGAINFER_TEST_FAULTS.
    const NAMES: [(&str, Self); 15] = [
        ("hangup", Self::Hangup),
        ("deadline", Self::Deadline),
        ("slow-client", Self::SlowClient),
        ("burst", Self::Burst),
        ("reset", Self::Reset),
        ("drain", Self::Drain),
        ("launch-fails", Self::LaunchFails),
        ("finish-fails", Self::FinishFails),
        ("device-lost", Self::DeviceLost),
        ("slow-step", Self::SlowStep),
        ("late-mask", Self::LateMask),
        ("broken-mask", Self::BrokenMask),
        ("clock-jump", Self::ClockJump),
        ("demux-lag", Self::DemuxLag),
        ("refused-row", Self::RefusedRow),
    ];
}

/// The kinds of faults allowed in a run.
#[derive(Debug, Clone)]
pub struct Allowed(Vec<Fault>);

impl Allowed {
    /// The kinds in PEGAINFER_TEST_FAULTS, separated by commas; all if it is not set, none if it is empty.
    pub fn from_env() -> Self {
        let all = || Fault::NAMES.iter().map(|(_, fault)| *fault);
        let Ok(names) = std::env::var("PEGAINFER_TEST_FAULTS") else { return Self(all().collect()) };
        let fault = |name: &str| {
            let found = Fault::NAMES.iter().find(|(known, _)| *known == name);
            found.unwrap_or_else(|| panic!("{name} is none of {:?}", Fault::NAMES.map(|(name, _)| name))).1
        };
        Self(names.split(',').filter(|name| !name.is_empty()).map(fault).collect())
    }
}

/// The faults of one world.
pub struct Faults {
    /// Random numbers of each kind; `None` for a kind that this world does not have.
    draws: [Option<Rng>; Fault::NAMES.len()],
}

impl Faults {
    /// About half of the allowed kinds, chosen by `seed`.
    pub fn new(seed: u64, allowed: &Allowed) -> Self {
        let draws = Fault::NAMES.map(|(_, fault)| {
            let mut rng = Rng(mix(mix(seed) ^ (fault as u64 + 1)));
            (rng.chance(50) && allowed.0.contains(&fault)).then_some(rng)
        });
        Self { draws }
    }

    /// True if a fault happens now, with a probability of `times` in 1,000.
    pub fn happens(&mut self, fault: Fault, times: usize) -> bool {
        self.draws[fault as usize].as_mut().is_some_and(|rng| rng.below(1000) < times)
    }

    /// A number below `n` for details of a fault.
    pub fn below(&mut self, fault: Fault, n: usize) -> usize {
        self.draws[fault as usize].as_mut().map_or(0, |rng| rng.below(n))
    }
}
