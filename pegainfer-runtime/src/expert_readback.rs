//! Counts the tokens of each expert in some steps, from the choices that a layer leaves on the device.

use pegainfer_core::exec::Exec;
use pegainfer_core::ledger::ExpertCounts;
use pegainfer_core::readback::Readback;
use pegainfer_core::schedule::STEPS_IN_FLIGHT;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// One step of so many is counted, in one layer. A copy takes 2 to 3 µs of a GPU's time, so that these are less than a
/// thousandth of the fastest decode steps.
const INTERVAL: u64 = 16;

/// The experts of a model whose choices can be counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertLayers {
    /// Number of layers whose experts see all tokens of a step.
    pub layers: usize,
    /// Routed experts of a layer.
    pub experts: usize,
    /// Experts of a token, a shared one included if it is among the choices.
    pub per_token: usize,
}

/// Copies the choices of one layer to the host in every [`INTERVAL`]th step, of each layer in turn.
#[derive(Debug)]
pub(super) struct ExpertReadback {
    shape: ExpertLayers,
    /// One is enough, because fewer steps are in flight than lie between two counted ones.
    readback: Readback,
    /// Layer whose choices are on their way.
    in_flight: Option<usize>,
    /// Steps that were sampled so far.
    started: u64,
    /// Those of them that are finished.
    finished: u64,
}

const _: () = assert!(INTERVAL > STEPS_IN_FLIGHT as u64);

impl ExpertReadback {
    /// For steps of up to `tokens` tokens.
    pub fn new(exec: &mut Exec, shape: ExpertLayers, tokens: usize) -> std::io::Result<Self> {
        let bytes = tokens * shape.per_token * DType::U32.size();
        let readback = Readback::new(exec, bytes.next_multiple_of(64))?;
        Ok(Self { shape, readback, in_flight: None, started: 0, finished: 0 })
    }

    /// Layer that is counted in step number `step`, if any is.
    fn layer(&self, step: u64) -> Option<usize> {
        step.is_multiple_of(INTERVAL).then(|| (step / INTERVAL % self.shape.layers as u64) as usize)
    }

    /// Goes on to the next step. Returns the layer of it whose choices [`start`](Self::start) is to copy, if any.
    pub fn next_step(&mut self) -> Option<usize> {
        self.started += 1;
        self.layer(self.started - 1)
    }

    /// Starts copying the choices of `layer`, `[tokens, per_token]` u32, after the ops of its step. Does not wait.
    pub fn start(&mut self, exec: &mut Exec, layer: usize, chosen: &Tensor) -> Result<(), OpError> {
        self.in_flight = Some(layer);
        self.readback.start(exec, &[chosen])
    }

    /// Waits for the choices of the oldest step in flight and counts them; `None` if it is not a counted one.
    pub fn finish(&mut self) -> Result<Option<ExpertCounts>, OpError> {
        self.finished += 1;
        let counted = self.layer(self.finished - 1).and_then(|_| self.in_flight.take());
        let Some(layer) = counted else { return Ok(None) };
        let mut tokens = vec![0; self.shape.experts];
        for expert in self.readback.wait()?.tensor::<u32>(0) {
            // A shared expert comes after the routed ones, and has all tokens.
            if let Some(tokens) = tokens.get_mut(*expert as usize) {
                *tokens += 1;
            }
        }
        Ok(Some(ExpertCounts { layer, tokens }))
    }

    /// Drops what is in flight, once the device is done with it.
    pub fn abandon(&mut self) {
        (self.in_flight, self.finished) = (None, self.started);
    }
}
