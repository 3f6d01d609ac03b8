//! State of a model outside of KV blocks.

use std::fmt::Debug;

/// A state after some prefix, in a slot of the device that nobody else changes while this value lives. `()` for models
/// with all state in KV blocks.
pub trait KeptState: Debug + Send + 'static {
    /// Number of the slot.
    fn slot(&self) -> u32;
}

impl KeptState for () {
    fn slot(&self) -> u32 {
        0
    }
}
