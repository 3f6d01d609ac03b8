//! Group-quantised weights: 4-bit and 8-bit integers and floats with a scale for each group of columns.

mod columns;
mod cut;
pub mod format;
mod name;
pub mod pack;
mod read;
mod round;
mod row;
mod rows;
mod weight;

pub use cut::{Cut, GroupError};
pub use format::{GroupFormat, GroupScales, Offset, ScaleDType, Values};
pub use name::UnknownFormat;
pub use weight::{GroupedWeight, StoredFormat, ZeroPoints};
