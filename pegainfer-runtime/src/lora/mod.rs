//! Low-rank adapters (LoRA) over a loaded model.
//!
//! - `config`, `patterns`: adapter_config.json, as PEFT writes it. `file`: the tensors of an adapter. `module`: what the
//!   model has for them. All refuse what the engine does not compute, by the name of the field or tensor.
//! - `layout`: the matrices of an adapter as the projections of a rank take them. `loader`: from a path to an adapter.
//! - `slots`: adapters on a device. `pass`: their part in a forward pass.

mod config;
mod error;
mod file;
mod layout;
mod loader;
mod module;
mod options;
mod pass;
mod patterns;
mod slots;

pub use error::AdapterError;
pub use loader::{AdapterLoader, LoadedAdapter};
pub use options::LoraOptions;
pub use pass::{Adapters, Projection, adapted_linear};
pub(super) use slots::AdapterMemory;
