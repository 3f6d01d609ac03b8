//! The ways in which a call is launched.

use super::call::{Call, Launch};
use super::case::{Output, Values};
use super::feed::Feed;
use super::operands::{Place, place_of_input};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::tensor::OpError;
use std::fmt;

/// How a call is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// By itself.
    Alone,
    /// As in a step, back to back with what comes before and behind it: each kernel may begin while the one in front of it
    /// still runs (programmatic dependent launch). It follows a launch of its own, with which it shares the GPU's workspace
    /// and counters, and the kernel that writes its activations; one that overwrites them comes behind it.
    Overlapped,
    /// From a CUDA graph that was captured with other values, and other lengths where rows decode, in the same tensors.
    Replayed,
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Alone => "alone",
            Self::Overlapped => "overlapped",
            Self::Replayed => "replayed",
        })
    }
}

impl Way {
    pub const ALL: [Self; 3] = [Self::Alone, Self::Overlapped, Self::Replayed];

    /// What each launch of `call` wrote whose inputs have their final values; all are to be the same.
    pub fn outputs(self, exec: &mut Exec, call: &mut Call<'_>) -> Result<Vec<Vec<Output>>, OpError> {
        let launches = match self {
            Self::Alone => vec![alone(exec, call)?],
            Self::Overlapped => overlapped(exec, call)?,
            Self::Replayed => vec![replayed(exec, call)?],
        };
        launches.iter().map(|launch| call.outputs(exec, launch)).collect()
    }
}

fn alone(exec: &mut Exec, call: &mut Call<'_>) -> Result<Launch, OpError> {
    let mut launch = call.prepare(exec, Values::Final)?;
    call.launch(exec, &mut launch)?;
    Ok(launch)
}

/// Two launches without a wait between them, the second one between kernels that write and overwrite what it reads.
fn overlapped(exec: &mut Exec, call: &mut Call<'_>) -> Result<Vec<Launch>, OpError> {
    let (operand, case) = (call.record.reads.first(), call.case);
    let mut fed = match (place_of_input(call.record), operand) {
        (Some(place), Some(operand)) => Feed::new(exec, operand, case)?.map(|feed| (place, operand, feed)),
        _ => None,
    };
    let (mut first, mut second) = (call.prepare(exec, Values::Final)?, call.prepare(exec, Values::Final)?);
    if let Some((_, operand, feed)) = &mut fed {
        feed.write(exec, operand, case, Values::Earlier)?;
    }
    call.launch(exec, &mut first)?;
    if let Some((place, operand, feed)) = &mut fed {
        feed.write(exec, operand, case, Values::Final)?;
        std::mem::swap(place.tensor(&mut call.read, &mut second.written), &mut feed.input);
    }
    call.launch(exec, &mut second)?;
    if let Some((Place::Read, operand, feed)) = &mut fed {
        std::mem::swap(&mut call.read[0], &mut feed.input);
        feed.write(exec, operand, case, Values::Earlier)?;
    }
    exec.synchronize()?;
    Ok(vec![first, second])
}

/// The call as a graph, whose inputs change between capture and replay. Another device than a GPU is called twice.
fn replayed(exec: &mut Exec, call: &mut Call<'_>) -> Result<Launch, OpError> {
    let mut launch = call.prepare(exec, Values::Earlier)?;
    // Loads the kernels and lets cuBLASLt choose.
    call.launch(exec, &mut launch)?;
    if exec.device() != Device::Cuda {
        call.refill(exec, &mut launch, Values::Final)?;
        call.launch(exec, &mut launch)?;
        return Ok(launch);
    }
    // A launch of its own follows copies, as in a step: the one before wrote what it may read early.
    call.refill(exec, &mut launch, Values::Earlier)?;
    exec.begin_capture()?;
    let launched = call.launch(exec, &mut launch);
    let graph = exec.end_capture();
    launched?;
    let graph = graph?;
    call.refill(exec, &mut launch, Values::Final)?;
    exec.replay(&graph)?;
    exec.synchronize()?;
    Ok(launch)
}
