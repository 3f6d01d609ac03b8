//! Terminal output of commands, and the values of their flags.
//!
//! - [`printable`]: text of models, files and clients, made safe for a terminal and a log.
//! - [`stdout`], [`stderr`]: print it. [`progress`]: bars, or log lines where there is no terminal.
//! - [`values`]: sizes, times and fractions of flags.
//!
//! ```
//! use pegainfer_terminal::printable::one_line;
//! use pegainfer_terminal::values::parse_bytes;
//!
//! assert_eq!(one_line("a\n\x1b[2J"), "a\\n\\u{1b}[2J");
//! assert_eq!(parse_bytes("4G"), Ok(4 << 30));
//! ```

pub mod printable;
pub mod progress;
pub mod stderr;
pub mod stdout;
pub mod values;
