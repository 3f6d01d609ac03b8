//! Ranks that compute one model together: their exchanges and their threads.
//!
//! A rank is a device with its part of the model. All ranks belong to one process, with one thread and one [`Exec`]
//! each. They run the same ops in the same order, so all ranks meet at the same exchanges.
//!
//! [`Exec`]: crate::exec::Exec

mod communicator;
mod fit;
mod local;
mod loop_back;
mod ranks;
mod shard;

pub use communicator::{
    Communicator, aborted, record_all_gather, record_all_gather_rows, record_all_reduce, record_reduce_add_norm,
    record_reduce_scatter, rows_of_rank,
};
pub use fit::{RankBytes, fewest_ranks};
pub use local::Local;
pub use loop_back::LoopBack;
pub use ranks::Ranks;
pub use shard::Shard;
