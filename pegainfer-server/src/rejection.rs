//! Limits at which requests are refused, as the counter of refusals names them.

/// A limit, or the drain, that a request met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rejection {
    /// `--max-queued-requests`.
    QueueFull,
    /// Open requests of one key.
    RequestsPerKey,
    /// Requests a minute of one key.
    Rpm,
    /// Tokens a minute of one key.
    Tpm,
    /// `--max-inflight-bytes`.
    InflightBytes,
    /// Output that a client left unread.
    UnreadOutput,
    /// The server is stopping.
    Draining,
}

impl Rejection {
    /// Every one.
    pub const ALL: [Self; 7] = [
        Self::QueueFull,
        Self::RequestsPerKey,
        Self::Rpm,
        Self::Tpm,
        Self::InflightBytes,
        Self::UnreadOutput,
        Self::Draining,
    ];

    /// Value of the label.
    pub fn name(self) -> &'static str {
        match self {
            Self::QueueFull => "queue_full",
            Self::RequestsPerKey => "requests_per_key",
            Self::Rpm => "rpm",
            Self::Tpm => "tpm",
            Self::InflightBytes => "inflight_bytes",
            Self::UnreadOutput => "unread_output",
            Self::Draining => "draining",
        }
    }
}
