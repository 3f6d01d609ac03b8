//! When an op begins.

use crate::cuda::{Cuda, DeviceMoment};
use crate::tensor::OpError;
use std::fmt;
use std::time::{Duration, Instant};

/// A moment of the host, or of a GPU's stream.
pub(super) enum Moment {
    Host(Instant),
    Device(DeviceMoment),
}

impl Moment {
    /// Now; on `gpu` when everything that was launched before has ended.
    pub fn now(gpu: Option<&Cuda>) -> Self {
        gpu.map_or_else(|| Self::Host(Instant::now()), |gpu| Self::Device(gpu.moment()))
    }

    /// The time since `earlier`, a moment of the same kind; zero for different kinds.
    pub fn since(&self, earlier: &Self) -> Result<Duration, OpError> {
        match (self, earlier) {
            (Self::Host(now), Self::Host(earlier)) => Ok(now.saturating_duration_since(*earlier)),
            (Self::Device(now), Self::Device(earlier)) => now.since(earlier),
            _ => Ok(Duration::ZERO),
        }
    }
}

impl fmt::Debug for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if matches!(self, Self::Host(_)) { "Moment::Host" } else { "Moment::Device" })
    }
}
