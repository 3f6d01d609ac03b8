//! Which times an engine keeps of its steps: a switch for measuring what they cost.

/// The variable of the environment that [`StepTiming::from_env`] reads.
const VARIABLE: &str = "PEGAINFER_STEP_TIMES";

/// What an engine measures of its steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StepTiming {
    /// Nothing: no step goes to the [`StepLog`](crate::ledger::StepLog).
    Off,
    /// The time of each step; of its ops while a slow step is investigated.
    Steps,
    /// The times of the ops of every step. On a GPU no step runs as a CUDA graph or overlaps with the next one then.
    Ops,
}

impl StepTiming {
    /// Steps, unless the environment says otherwise.
    pub fn from_env() -> Self {
        let value = std::env::var(VARIABLE).unwrap_or_default();
        Self::parse(&value).unwrap_or_else(|| {
            log::warn!("PEGAINFER_STEP_TIMES is {value:?} and has no effect: give off or ops, or remove it");
            Self::Steps
        })
    }

    /// `None` of an unknown value.
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
