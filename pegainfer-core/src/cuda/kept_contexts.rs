//! Contexts that stay when the last user of their GPU has left, because a new one takes a quarter of a second.

use cudarc::driver::CudaContext;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One for each GPU that was opened; `None` if none are kept.
static KEPT: Mutex<Option<Vec<Arc<CudaContext>>>> = Mutex::new(None);

/// Keeps the contexts of GPUs that are opened from now on, half a gigabyte of each one's memory, for servers whose
/// engines come and go.
pub fn keep_contexts() {
    lock().get_or_insert_default();
}

/// A GPU was opened.
pub(super) fn opened(context: &Arc<CudaContext>) {
    if let Some(kept) = &mut *lock()
        && kept.iter().all(|other| other.ordinal() != context.ordinal())
    {
        kept.push(context.clone());
    }
}

/// Work of a context has failed, after which it is of no use.
pub(super) fn failed(context: &CudaContext) {
    if let Some(kept) = &mut *lock() {
        kept.retain(|other| other.ordinal() != context.ordinal());
    }
}

fn lock() -> MutexGuard<'static, Option<Vec<Arc<CudaContext>>>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}
