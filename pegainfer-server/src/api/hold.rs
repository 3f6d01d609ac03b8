//! Resources that a request holds until its prompt is tokenized.

use super::state::{AppState, encoder_error, over_budget};
use crate::budget::BodyShare;
use crate::error::ApiError;
use crate::fair_queue::Permits;
use crate::tenant::Tenant;
use crate::text_service::{CancelCheck, Checkpoint, LARGE};
use pegainfer_text::Tokenizer;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A request's share of the memory budget, and its turn of large work if its body is large. Clones share both. Work
/// that runs for the request keeps a clone, so that a client that leaves frees nothing that is in use.
///
/// All requests take resources in the same order, so deadlocks cannot happen: the turn of a large body, then memory,
/// then the response's share. A large body therefore waits for its turn without memory for parsed values, and keeps the
/// turn until its prompt is tokenized.
#[derive(Clone)]
pub struct Hold {
    tenant: Tenant,
    /// Bytes of the body.
    size: usize,
    held: Arc<Mutex<HeldResources>>,
}

#[derive(Default)]
struct HeldResources {
    memory: BodyShare,
    turn: Option<Permits>,
}

impl Hold {
    /// Waits until a body of `size` bytes with `values` JSON values may be parsed.
    pub async fn begin(tenant: Tenant, size: usize, values: usize, state: &AppState) -> Result<Self, ApiError> {
        let hold = Self { tenant, size, held: Arc::default() };
        if size > LARGE {
            let turn = state.workers.large_turn(tenant, size).await;
            hold.held().turn = Some(turn.map_err(|error| encoder_error(&error))?);
        }
        let memory = state.budget.parse(tenant, size, values).await.map_err(|error| over_budget(&error, state))?;
        hold.held().memory = memory;
        Ok(hold)
    }

    /// Runs work on the request off the async threads, see [`Workers::work`](crate::text_service::Workers::work).
    pub async fn work<T: Send + 'static>(
        &self,
        state: &AppState,
        work: impl FnOnce(&CancelCheck<'_>) -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let hold = self.clone();
        let result = if self.size <= LARGE {
            let work = move |cancel: &CancelCheck<'_>| {
                let _hold = hold;
                work(cancel)
            };
            state.workers.share_thread(self.tenant, work).await
        } else {
            state.workers.own_thread(hold, work).await
        };
        result.map_err(|error| encoder_error(&error))
    }

    /// Runs work with the tokenizer of the request's model off the async threads.
    pub async fn tokenize<T: Send + 'static>(
        &self,
        state: &AppState,
        checkpoint: &Checkpoint,
        work: impl FnOnce(&Arc<Tokenizer>, &CancelCheck<'_>) -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let hold = self.clone();
        let result = if self.size <= LARGE {
            let work = move |tokenizer: &Arc<Tokenizer>, cancel: &CancelCheck<'_>| {
                let _hold = hold;
                work(tokenizer, cancel)
            };
            checkpoint.encoder.share_thread(&state.workers, self.tenant, work).await
        } else {
            let tokenizer = checkpoint.tokenizer.clone();
            state.workers.own_thread(hold, move |cancel: &CancelCheck<'_>| work(&tokenizer, cancel)).await
        };
        result.map_err(|error| encoder_error(&error))
    }

    /// True if the request holds a turn of large work.
    pub fn has_turn(&self) -> bool {
        self.held().turn.is_some()
    }

    /// Gives back the memory beyond `bytes` bytes.
    pub fn shrink(&self, bytes: usize) {
        self.held().memory.shrink(bytes);
    }

    /// Gives back the turn and the memory beyond `bytes` bytes. Call it when there is no more work to do.
    pub fn keep(&self, bytes: usize) {
        let mut held = self.held();
        held.turn = None;
        held.memory.shrink(bytes);
    }

    fn held(&self) -> MutexGuard<'_, HeldResources> {
        // Nothing that can panic runs under the lock.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold").field("size", &self.size).finish_non_exhaustive()
    }
}
