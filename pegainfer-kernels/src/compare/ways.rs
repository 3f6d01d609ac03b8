//! Ways of launching a call.

use super::call::{Call, Launch};
use super::case::{Output, Values};
use super::feed::Feed;
use super::operands::{Place, place_of_input};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::tensor::OpError;
use std::fmt;

/// Way of launching a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Alone.
    Alone,
    /// As in a step, back to back with its neighbours: each kernel may start while the previous one still runs
    /// (programmatic dependent launch). It follows another launch of the same call, with which it shares the GPU's
    /// workspace and counters, and the kernel that writes its activations. A kernel that overwrites them follows it.
    Overlapped,
    /// From a CUDA graph captured with other values in the same tensors, and with other lengths of decoding rows.
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

    /// Outputs of each launch of `call` with final inputs; all must be equal.
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

/// Two launches without a wait in between, the second between kernels that write and overwrite its inputs.
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

/// The call as a graph, with inputs that change between capture and replay. On other devices, the call is launched
/// twice.
fn replayed(exec: &mut Exec, call: &mut Call<'_>) -> Result<Launch, OpError> {
    let mut launch = call.prepare(exec, Values::Earlier)?;
    // Loads the kernels and lets cuBLASLt choose.
    call.launch(exec, &mut launch)?;
    if exec.device() != Device::Cuda {
        call.refill(exec, &mut launch, Values::Final)?;
        call.launch(exec, &mut launch)?;
        return Ok(launch);
    }
    // A separate launch follows copies, as in a step: its early inputs were written by an earlier one.
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
