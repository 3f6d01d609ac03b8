//! The notify protocol of systemd: ready, stopping, and a watchdog. Without `NOTIFY_SOCKET` nothing is sent.

use crate::models::Models;
use std::sync::Arc;

/// Tells systemd that the server is ready. The future feeds the watchdog of the unit, if it has one, as long as the
/// server is healthy: twice in each interval. It never resolves.
#[cfg(target_os = "linux")]
pub async fn ready(models: Arc<Models>) {
    use sd_notify::NotifyState;
    send(NotifyState::Ready);
    let Some(interval) = sd_notify::watchdog_enabled() else { return std::future::pending().await };
    let mut beats = tokio::time::interval(interval / 2);
    loop {
        beats.tick().await;
        if is_healthy(&models) {
            send(NotifyState::Watchdog);
        }
    }
}

/// True if no model is in memory, or one of them makes progress.
#[cfg(target_os = "linux")]
fn is_healthy(models: &Arc<Models>) -> bool {
    let loaded = models.peek_all();
    loaded.is_empty() || loaded.iter().any(|model| model.engine.is_healthy())
}

/// Tells systemd that the server stops.
#[cfg(target_os = "linux")]
pub fn stopping() {
    send(sd_notify::NotifyState::Stopping);
}

#[cfg(target_os = "linux")]
fn send(state: sd_notify::NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        log::warn!("systemd cannot be told how the server is: {error}");
    }
}

/// Never resolves: other systems have no such protocol.
#[cfg(not(target_os = "linux"))]
pub async fn ready(_: Arc<Models>) {
    std::future::pending().await
}

/// Does nothing.
#[cfg(not(target_os = "linux"))]
pub fn stopping() {}
