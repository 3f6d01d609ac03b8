//! Output as a sequence of content blocks. In the Responses and Messages APIs each block begins, grows and ends.

use super::delta::Finish;
use super::generation::Generation;
use super::large_response::GrowingResponse;
use super::state::AppState;
use super::submitted_chat::ChoiceParser;
use crate::error::ApiError;
use pegainfer_text::is_object;
use pegainfer_text::parser::Event;

/// One block of output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Block {
    /// Reasoning text.
    Reasoning(String),
    /// Text for the user.
    Text(String),
    /// A function call.
    Call {
        /// Index of the call among the calls of the output.
        index: usize,
        /// Id of the call.
        id: String,
        /// Name of the function.
        name: String,
        /// Arguments: the text of a JSON object.
        arguments: String,
        /// Set at the end of the call: false if the model's turn ended inside it.
        complete: bool,
    },
}

/// A change of the block with this index.
#[derive(Debug, PartialEq, Eq)]
pub enum BlockChange {
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
    /// True if the output was cut off at the maximum number of tokens.
    cut: bool,
}

impl Blocks {
    /// Appends events and returns the resulting changes.
    pub fn push(&mut self, events: Vec<Event>) -> Vec<BlockChange> {
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
                Event::ToolStart { index, id, name } => {
                    let (arguments, complete) = (String::new(), false);
                    self.begin(Block::Call { index, id, name, arguments, complete }, &mut changes);
                }
                Event::ToolArguments { index, delta } if self.open_call() == Some(index) => {
                    self.grow(delta, &mut changes);
                }
                Event::ToolEnd { index, complete } if self.open_call() == Some(index) => {
                    changes.extend(self.end_call(complete));
                }
                // In another block they would become text or another call's arguments.
                Event::ToolArguments { index, .. } | Event::ToolEnd { index, .. } => {
                    debug_assert!(false, "call {index} is not open");
                }
            }
        }
        changes
    }

    /// Ends the output: closes the last block, if one is open.
    pub fn finish(&mut self, finish: Option<&Finish>) -> Option<BlockChange> {
        self.cut = finish.is_some_and(|finish| finish.reason == "length");
        self.close()
    }

    /// False if the output ended inside the block.
    pub fn is_complete(&self, at: usize) -> bool {
        match &self.blocks[at] {
            Block::Call { complete, .. } => *complete,
            Block::Reasoning(_) | Block::Text(_) => !(self.cut && at + 1 == self.blocks.len()),
        }
    }

    /// All blocks, in order.
    pub fn all(&self) -> &[Block] {
        &self.blocks
    }

    fn open_block(&self) -> Option<&Block> {
        self.blocks.last().filter(|_| self.open)
    }

    /// The index of the call that is open.
    fn open_call(&self) -> Option<usize> {
        match self.open_block()? {
            Block::Call { index, .. } => Some(*index),
            Block::Reasoning(_) | Block::Text(_) => None,
        }
    }

    /// Closes the open block. A call that ends without an event is complete if its arguments are.
    fn close(&mut self) -> Option<BlockChange> {
        let complete = match self.open_block()? {
            Block::Call { arguments, .. } => is_object(arguments),
            Block::Reasoning(_) | Block::Text(_) => true,
        };
        self.end_call(complete)
    }

    fn end_call(&mut self, is_complete: bool) -> Option<BlockChange> {
        if let Some(Block::Call { complete, .. }) = self.blocks.last_mut() {
            *complete = is_complete;
        }
        std::mem::take(&mut self.open).then(|| BlockChange::Close(self.blocks.len() - 1))
    }

    fn begin(&mut self, block: Block, changes: &mut Vec<BlockChange>) {
        changes.extend(self.close());
        self.blocks.push(block);
        self.open = true;
        changes.push(BlockChange::Open(self.blocks.len() - 1));
    }

    fn grow(&mut self, more: String, changes: &mut Vec<BlockChange>) {
        let at = self.blocks.len().saturating_sub(1);
        if let Some(Block::Reasoning(text) | Block::Text(text) | Block::Call { arguments: text, .. }) =
            self.blocks.last_mut()
        {
            text.push_str(&more);
            changes.push(BlockChange::Grow(at, more));
        }
    }
}

/// Forwards the parser events of a generation until its end, within the memory budget of responses. Returns why it
/// ended.
pub async fn collect(
    generation: &mut Generation,
    parser: &mut ChoiceParser,
    growing: &GrowingResponse,
    state: &AppState,
    mut push: impl FnMut(Vec<Event>),
) -> Result<Option<Finish>, ApiError> {
    let mut finish = None;
    while let Some(delta) = generation.next().await {
        let mut delta = delta?;
        growing.add(&delta, state)?;
        push(parser.parse(&mut delta));
        finish = delta.finish;
    }
    Ok(finish)
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
        let (open, grow, close) =
            (BlockChange::Open, |at, text: &str| BlockChange::Grow(at, text.into()), BlockChange::Close);
        assert_eq!(blocks.push(vec![Event::Reasoning("a".into())]), [open(0), grow(0, "a")]);
        assert_eq!(blocks.push(vec![content("b")]), [close(0), open(1), grow(1, "b")]);
        assert_eq!(blocks.push(vec![content("c")]), [grow(1, "c")]);
        assert_eq!(
            blocks.push(vec![call(0), arguments, call(1)]),
            [close(1), open(2), grow(2, "{}"), close(2), open(3)]
        );
        assert_eq!((blocks.finish(None), blocks.finish(None)), (Some(close(3)), None));
        let call = |index: usize, arguments: &str, complete: bool| {
            let (id, name, arguments) = (format!("call_{index}"), "f".into(), arguments.into());
            Block::Call { index, id, name, arguments, complete }
        };
        let expected =
            [Block::Reasoning("a".into()), Block::Text("bc".into()), call(0, "{}", true), call(1, "", false)];
        assert_eq!(blocks.all(), expected);
    }

    #[test]
    fn the_end_of_a_call_closes_its_block_and_tells_whether_it_is_complete() {
        let mut blocks = Blocks::default();
        let start = |index: usize| Event::ToolStart { index, id: "c".into(), name: "f".into() };
        let arguments = |index: usize| Event::ToolArguments { index, delta: "{}".into() };
        let end = |index: usize, complete: bool| Event::ToolEnd { index, complete };
        let (open, grow, close) = (BlockChange::Open, |at| BlockChange::Grow(at, "{}".into()), BlockChange::Close);
        assert_eq!(blocks.push(vec![start(0), arguments(0), end(0, true)]), [open(0), grow(0), close(0)]);
        assert_eq!(blocks.push(vec![start(1), arguments(1), end(1, false)]), [open(1), grow(1), close(1)]);
        let more = vec![Event::Content("a".into()), start(2), arguments(2), end(2, true)];
        assert_eq!(blocks.push(more).len(), 6);
        assert_eq!(blocks.finish(Some(&Finish { reason: "length", stop_reason: None })), None);
        let complete: Vec<bool> = (0..blocks.all().len()).map(|at| blocks.is_complete(at)).collect();
        assert_eq!(complete, [true, false, true, true], "only a call that the model did not finish is incomplete");
    }

    #[test]
    fn text_is_incomplete_if_the_output_was_cut_off_inside_it() {
        for (reason, complete) in [("length", false), ("stop", true)] {
            let mut blocks = Blocks::default();
            blocks.push(vec![Event::Reasoning("a".into()), Event::Content("b".into())]);
            assert_eq!(blocks.finish(Some(&Finish { reason, stop_reason: None })), Some(BlockChange::Close(1)));
            assert_eq!([blocks.is_complete(0), blocks.is_complete(1)], [true, complete], "{reason}");
        }
    }

    /// Arguments after the end of their call are a parser bug, which builds with assertions report.
    #[test]
    #[cfg_attr(debug_assertions, should_panic(expected = "call 0 is not open"))]
    fn arguments_never_go_to_another_block() {
        let mut blocks = Blocks::default();
        blocks.push(vec![
            Event::ToolStart { index: 0, id: "c".into(), name: "f".into() },
            Event::Content("a".into()),
            Event::ToolArguments { index: 0, delta: "{}".into() },
        ]);
        assert_eq!(blocks.all()[1], Block::Text("a".into()));
    }
}
