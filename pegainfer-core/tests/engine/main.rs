//! The engine without a model: the scheduler over a simulated device, a whole engine under faults and a virtual clock,
//! the engine thread over a scripted engine, several engines behind one handle, and checkpoints.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod device;
mod drafts;
mod engine_loop;
mod faults;
mod front;
mod gguf;
mod grouped;
mod kinds;
mod loads;
mod requests;
mod scheduler;
mod weights;
