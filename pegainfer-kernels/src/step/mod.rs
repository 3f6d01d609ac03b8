//! What the steps of every engine begin and end with: inputs on the device, and from hidden states to tokens on the host.

mod adjustments;
mod inputs;
mod keep;
mod results;
mod sampler;
mod state;

pub use inputs::Inputs;
pub use keep::keep_rows;
use results::Results;
pub use sampler::Sampler;
pub use state::{StepSize, StepState};
