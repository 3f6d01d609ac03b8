//! Running calls by the name that their client gave them, so that `Abort` can cancel them.

use crate::error::ApiError;
use crate::grpc_status::CANCELLED;
use crate::tenant::Tenant;
use axum::http::StatusCode;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;

/// Code of the error of a cancelled call.
const ABORTED: &str = "aborted";

/// Running calls. A client may give several calls the same name.
#[derive(Debug, Default)]
pub struct Aborts(Mutex<HashMap<String, Vec<Call>>>);

#[derive(Debug)]
struct Call {
    tenant: Tenant,
    abort: Arc<watch::Sender<bool>>,
}

/// A running call, listed until it is dropped.
pub struct AbortEntry {
    all: Arc<Aborts>,
    name: String,
    abort: Arc<watch::Sender<bool>>,
}

impl fmt::Debug for AbortEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AbortEntry").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Aborts {
    /// Lists a call of `tenant`.
    pub fn enter(self: &Arc<Self>, tenant: Tenant, name: String) -> AbortEntry {
        let abort = Arc::new(watch::Sender::new(false));
        self.calls().entry(name.clone()).or_default().push(Call { tenant, abort: abort.clone() });
        AbortEntry { all: self.clone(), name, abort }
    }

    /// Cancels the calls with this name: those of `tenant`, or everybody's without a tenant.
    pub fn abort(&self, tenant: Option<Tenant>, name: &str) {
        let calls = self.calls();
        let of_tenant = |call: &&Call| tenant.is_none_or(|tenant| tenant == call.tenant);
        for call in calls.get(name).into_iter().flatten().filter(of_tenant) {
            call.abort.send_replace(true);
        }
    }

    fn calls(&self) -> MutexGuard<'_, HashMap<String, Vec<Call>>> {
        // Nothing that can panic runs under the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AbortEntry {
    /// Resolves with the error of a cancelled call.
    pub fn aborted(&self) -> impl Future<Output = ApiError> + Send + 'static {
        let mut aborted = self.abort.subscribe();
        async move {
            if aborted.wait_for(|aborted| *aborted).await.is_err() {
                // The call is over.
                std::future::pending::<()>().await;
            }
            let status = StatusCode::from_u16(CANCELLED).unwrap_or(StatusCode::BAD_REQUEST);
            ApiError::new(status, "the request was cancelled by Abort").with_code(ABORTED)
        }
    }
}

/// True for the error of a cancelled call.
pub fn is_abort(error: &ApiError) -> bool {
    error.reason() == ABORTED
}

impl Drop for AbortEntry {
    fn drop(&mut self) {
        let mut calls = self.all.calls();
        let Some(same) = calls.get_mut(&self.name) else { return };
        same.retain(|call| !Arc::ptr_eq(&call.abort, &self.abort));
        if same.is_empty() {
            calls.remove(&self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn a_client_cancels_its_own_calls_by_name() {
        let all = Arc::new(Aborts::default());
        let [one, other] = [1, 2].map(|id| Tenant { id, has_key: true });
        let calls = [(one, "a"), (one, "a"), (one, "b"), (other, "a")];
        let calls = calls.map(|(tenant, name)| all.enter(tenant, name.into()));
        let aborted = || calls.each_ref().map(|call| call.aborted().now_or_never().is_some());
        all.abort(Some(one), "a");
        all.abort(Some(one), "nobody");
        assert_eq!(aborted(), [true, true, false, false]);
        all.abort(None, "a");
        assert_eq!(aborted(), [true, true, false, true]);
        assert!(is_abort(&calls[0].aborted().now_or_never().unwrap()));
        drop(calls);
        assert!(all.calls().is_empty(), "nothing is left of calls that have ended");
    }
}
