//! Selection of the step times that an engine keeps, to measure their cost.

/// Environment variable read by [`StepTiming::from_env`].
const VARIABLE: &str = "PEGAINFER_STEP_TIMES";

/// Step times that an engine measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StepTiming {
    /// None: no step is added to the [`StepLog`](crate::ledger::StepLog).
    Off,
    /// Times of steps, and of ops while a slow step is investigated.
    Steps,
    /// Times of every op. On a GPU, steps then use no CUDA graphs and do not overlap.
    Ops,
}

impl StepTiming {
    /// Times of steps, unless the environment variable says otherwise.
    pub fn from_env() -> Self {
        let value = std::env::var(VARIABLE).unwrap_or_default();
        Self::parse(&value).unwrap_or_else(|| {
            log::warn!("PEGAINFER_STEP_TIMES is {value:?} and has no effect: give off or ops, or remove it");
            Self::Steps
        })
    }

    /// `None` for an unknown value.
    fn parse(value: &str) -> Option<Self> {
        match value {
            "" => Some(Self::Steps),
            "off" => Some(Self::Off),
            "ops" => Some(Self::Ops),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::StepTiming;

    #[test]
    fn steps_are_timed_unless_the_variable_says_otherwise() {
        let parsed = ["", "off", "ops", "on"].map(StepTiming::parse);
        assert_eq!(parsed, [Some(StepTiming::Steps), Some(StepTiming::Off), Some(StepTiming::Ops), None]);
    }
}
