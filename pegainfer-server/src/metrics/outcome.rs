//! How a request ends.

/// Outcome of a request, in ascending order of attention needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// EOS, stop token or stop string.
    Stop,
    /// `max_tokens` or the context length was reached.
    Length,
    /// The client left, or the deadline passed.
    Abort,
    /// The engine failed.
    Error,
}

impl Outcome {
    /// Every one.
    pub const ALL: [Self; 4] = [Self::Stop, Self::Length, Self::Abort, Self::Error];

    /// Value of the label and of the log line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error => "error",
        }
    }
}
