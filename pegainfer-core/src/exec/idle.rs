//! GPUs that stay open while no model uses them.

use super::attached::Attached;
use crate::cuda::Cuda;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The open GPUs that nobody uses, at most one context of each; `None` if GPUs are closed.
static IDLE: Mutex<Option<Vec<IdleGpu>>> = Mutex::new(None);

/// An open GPU, and the values that other crates attached to it.
pub(super) struct IdleGpu {
    /// Dropped before the GPU, which the values may use.
    pub attached: Attached,
    pub cuda: Cuda,
}

/// Keeps GPUs open from now on: when an [`Exec`](super::Exec) is dropped, its context stays with its loaded kernels, and
/// the next `Exec` on that GPU takes it over. For a process whose models come and go, because opening a GPU and loading
/// kernels takes half a second. An idle context holds 0.7 to 2 GB of the GPU's memory.
pub fn keep_gpus_open() {
    idle().get_or_insert_default();
}

/// The idle context of GPU `ordinal`, if there is one that works.
pub(super) fn take(ordinal: usize) -> Option<IdleGpu> {
    let taken = {
        let mut idle = idle();
        let gpus = idle.as_mut()?;
        let found = gpus.iter().position(|gpu| gpu.cuda.ordinal() == ordinal)?;
        gpus.swap_remove(found)
    };
    rested(taken)
}

/// Keeps a GPU that nobody uses any more, or closes it.
pub(super) fn keep(gpu: IdleGpu) {
    if idle().is_none() {
        return;
    }
    let Some(gpu) = rested(gpu) else { return };
    let surplus = match &mut *idle() {
        Some(gpus) if gpus.iter().all(|other| other.cuda.ordinal() != gpu.cuda.ordinal()) => {
            gpus.push(gpu);
            None
        }
        _ => Some(gpu),
    };
    // Closing takes a while, so others need not wait for it.
    drop(surplus);
}

/// The GPU once it has completed everything; `None` if it reports an error, which is permanent.
fn rested(mut gpu: IdleGpu) -> Option<IdleGpu> {
    match gpu.cuda.rest() {
        Ok(()) => Some(gpu),
        Err(error) => {
            log::debug!("GPU {} is closed: {error}", gpu.cuda.ordinal());
            None
        }
    }
}

fn idle() -> MutexGuard<'static, Option<Vec<IdleGpu>>> {
    IDLE.lock().unwrap_or_else(PoisonError::into_inner)
}
