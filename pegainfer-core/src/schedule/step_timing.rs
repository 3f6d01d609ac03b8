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
        Self::parse(std::env::var(VARIABLE).as_deref().unwrap_or_default())
    }

    /// An unknown value changes nothing.
    fn parse(value: &str) -> Self {
        match value {
            "off" => Self::Off,
            "ops" => Self::Ops,
            _ => Self::Steps,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::StepTiming;

    #[test]
    fn steps_are_timed_unless_the_variable_says_otherwise() {
        let parsed = ["", "off", "ops", "steps", "on"].map(StepTiming::parse);
        let steps = StepTiming::Steps;
        assert_eq!(parsed, [steps, StepTiming::Off, StepTiming::Ops, steps, steps]);
    }
}
