//! Unloads models that nobody has used for a while, and those whose engines have stopped.

use super::Models;
use super::entry::{Entry, KeepAlive, State};
use super::error::LoadError;
use super::status::stopped;
use super::switch::Leave;
use pegainfer_core::exec::keep_gpus_open;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Interval between checks.
const CHECKED: Duration = Duration::from_millis(250);

impl Models {
    /// Starts the thread that unloads models. It ends with the last reference to them. GPUs stay open between models.
    ///
    /// # Errors
    /// The system has no thread left.
    pub fn tend(self: &Arc<Self>) -> std::io::Result<()> {
        keep_gpus_open();
        let models = Arc::downgrade(self);
        let run = move || {
            while let Some(models) = models.upgrade() {
                models.unload_idle();
                drop(models);
                thread::sleep(CHECKED);
            }
        };
        thread::Builder::new().name("models".into()).spawn(run).map(drop)
    }

    /// Unloads each model whose idle time is over, or whose engine has stopped.
    fn unload_idle(self: &Arc<Self>) {
        let due = |(id, entry): (usize, &Entry)| {
            let stopped = entry.stopped();
            let why = stopped.clone().or_else(|| entry.idle_for(self.limits.idle_time))?;
            Some((id, why, stopped.is_some()))
        };
        let due: Vec<_> = self.table().entries.iter().enumerate().filter_map(due).collect();
        for (id, why, has_stopped) in due {
            if self.evict(id, Leave::Unload, &why) && has_stopped {
                let mut table = self.table();
                let entry = &mut table.entries[id];
                if matches!(entry.state, State::Unloaded) {
                    entry.state = State::Failed { error: LoadError::Failed(why), at: Instant::now() };
                }
            }
        }
    }
}

impl Entry {
    /// Why its engine has stopped, if it has and the model can be loaded again.
    fn stopped(&self) -> Option<String> {
        self.spec.loader.as_ref()?;
        let model = match &self.state {
            State::Loaded(model) if self.uses == 0 => model,
            _ => return None,
        };
        stopped(model)
    }

    /// Why it leaves, if it has been idle for too long. `default`: the server's idle time.
    fn idle_for(&self, default: Option<Duration>) -> Option<String> {
        let limit = match self.keep_alive {
            Some(KeepAlive::Always) => return None,
            Some(KeepAlive::For(limit)) => limit,
            None => self.spec.idle_time.or(default)?,
        };
        let has_ended = self.is_idle() && self.last_use.elapsed() >= limit;
        has_ended.then(|| format!("its idle time of {} s is over", limit.as_secs_f64()))
    }
}
