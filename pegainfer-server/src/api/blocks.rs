//! Output as a sequence of content blocks: in the Responses and Messages APIs each block begins, grows and ends.

use super::delta::Finish;
use super::generation::Generation;
use super::submitted_chat::ChoiceParser;
use crate::error::ApiError;
use crate::text::parser::Event;

/// One block of output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Block {
    /// Reasoning text.
    Reasoning(String),
    /// Text for the user.
    Text(String),
    /// A function call.
    Call {
        /// Id of the call.
        id: String,
        /// Name of the function.
        name: String,
        /// Arguments: a JSON object, as the model wrote it.
        arguments: String,
    },
}

/// A change of a block, which is named by its index.
#[derive(Debug, PartialEq, Eq)]
pub enum Change {
    /// The block begins, empty.
    Open(usize),
    /// The block grows by this text.
    Grow(usize, String),
    /// The block is complete.
    Close(usize),
}

/// The blocks so far. At most the last one is open.
#[derive(Debug, Default)]
pub struct Blocks {
    blocks: Vec<Block>,
    open: bool,
}

impl Blocks {
    /// Appends events and returns the changes that they cause.
    pub fn push(&mut self, events: Vec<Event>) -> Vec<Change> {
        let mut changes = Vec::new();
        for event in events {
            match event {
                Event::Reasoning(text) => {
                    if !matches!(self.open_block(), Some(Block::Reasoning(_))) {
                        self.begin(Block::Reasoning(String::new()), &mut changes);
                    }
                    self.grow(text, &mut changes);
                }
                Event::Content(text) => {
                    if !matches!(self.open_block(), Some(Block::Text(_))) {
                        self.begin(Block::Text(String::new()), &mut changes);
                    }
                    self.grow(text, &mut changes);
                }
                Event::ToolStart { id, name, .. } => {
                    self.begin(Block::Call { id, name, arguments: String::new() }, &mut changes);
                }
                Event::ToolArguments { delta, .. } => self.grow(delta, &mut changes),
                Event::ToolEnd { .. } => changes.extend(self.close()),
            }
        }
        changes
    }

    /// Ends the last block, if one is open.
    pub fn close(&mut self) -> Option<Change> {
        std::mem::take(&mut self.open).then(|| Change::Close(self.blocks.len() - 1))
    }

    /// All blocks, in order.
    pub fn all(&self) -> &[Block] {
        &self.blocks
    }

    fn open_block(&self) -> Option<&Block> {
        self.blocks.last().filter(|_| self.open)
    }

    fn begin(&mut self, block: Block, changes: &mut Vec<Change>) {
        changes.extend(self.close());
        self.blocks.push(block);
        self.open = true;
        changes.push(Change::Open(self.blocks.len() - 1));
    }

    fn grow(&mut self, more: String, changes: &mut Vec<Change>) {
        let at = self.blocks.len().saturating_sub(1);
        if let Some(Block::Reasoning(text) | Block::Text(text) | Block::Call { arguments: text, .. }) =
            self.blocks.last_mut()
        {
            text.push_str(&more);
            changes.push(Change::Grow(at, more));
        }
    }
}

/// The complete output of one choice.
pub struct CompleteOutput {
    /// All blocks.
    pub blocks: Blocks,
    /// Why the generation ended.
    pub finish: Option<Finish>,
}

/// Waits for the end of the generation and collects its blocks.
pub async fn collect(generation: &mut Generation, parser: &mut ChoiceParser) -> Result<CompleteOutput, ApiError> {
    let (mut blocks, mut finish) = (Blocks::default(), None);
    while let Some(delta) = generation.next().await {
        let mut delta = delta?;
        blocks.push(parser.parse(&mut delta));
        finish = delta.finish;
    }
    blocks.close();
    Ok(CompleteOutput { blocks, finish })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_open_grow_and_close() {
        let mut blocks = Blocks::default();
        let content = |text: &str| Event::Content(text.into());
        let call = |index: usize| Event::ToolStart { index, id: format!("call_{index}"), name: "f".into() };
        let arguments = Event::ToolArguments { index: 0, delta: "{}".into() };
        let (open, grow, close) = (Change::Open, |at, text: &str| Change::Grow(at, text.into()), Change::Close);
        assert_eq!(blocks.push(vec![Event::Reasoning("a".into())]), [open(0), grow(0, "a")]);
        assert_eq!(blocks.push(vec![content("b")]), [close(0), open(1), grow(1, "b")]);
        assert_eq!(blocks.push(vec![content("c")]), [grow(1, "c")]);
        assert_eq!(
            blocks.push(vec![call(0), arguments, call(1)]),
            [close(1), open(2), grow(2, "{}"), close(2), open(3)]
        );
        assert_eq!((blocks.close(), blocks.close()), (Some(close(3)), None));
        let call =
            |id: &str, arguments: &str| Block::Call { id: id.into(), name: "f".into(), arguments: arguments.into() };
        let expected =
            [Block::Reasoning("a".into()), Block::Text("bc".into()), call("call_0", "{}"), call("call_1", "")];
        assert_eq!(blocks.all(), expected);
    }
}
