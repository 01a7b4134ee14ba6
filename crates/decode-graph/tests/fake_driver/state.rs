//! Everything that a process has asked for.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use kernels_ptx::Kernel;

use crate::memory::Memory;
use crate::run::Node;

/// A `CUresult`.
pub(crate) type Code = i32;
pub(crate) const INVALID_VALUE: Code = 1;
pub(crate) const OUT_OF_MEMORY: Code = 2;
pub(crate) const NOT_FOUND: Code = 500;
pub(crate) const ILLEGAL_ADDRESS: Code = 700;

/// What is being recorded on a stream.
#[derive(Default)]
pub(crate) struct Capture {
    pub(crate) running: bool,
    pub(crate) invalid: bool,
    pub(crate) nodes: Vec<Node>,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) memory: Memory,
    pub(crate) streams: HashMap<usize, Capture>,
    pub(crate) events: HashSet<usize>,
    pub(crate) modules: HashMap<usize, Vec<Kernel>>,
    /// With the module that each is of.
    pub(crate) functions: HashMap<usize, (usize, Kernel)>,
    pub(crate) graphs: HashMap<usize, Arc<[Node]>>,
    pub(crate) executables: HashMap<usize, Arc<[Node]>>,
    pub(crate) retained: usize,
    handles: usize,
    wish: Wish,
    /// The code of every call once the device is lost.
    lost: Option<Code>,
}

impl State {
    pub(crate) fn handle(&mut self) -> usize {
        self.handles += 1;
        self.handles
    }

    pub(crate) fn stream(&mut self, stream: usize) -> Result<&mut Capture, Code> {
        self.streams.get_mut(&stream).ok_or(INVALID_VALUE)
    }

    /// Records work, or does it at once.
    pub(crate) fn queue(&mut self, stream: usize, node: Node) -> Result<(), Code> {
        let capture = self.stream(stream)?;
        if capture.invalid {
            return Err(crate::CAPTURE_INVALIDATED);
        }
        if capture.running {
            capture.nodes.push(node);
            return Ok(());
        }
        if let Err(code) = node.run(&self.memory) {
            // As on a device: a later call learns of it.
            self.lost = Some(code);
        }
        Ok(())
    }

    pub(crate) fn fail_call(&mut self, function: String, number: u32, code: Code) -> bool {
        let wish = Wish { function, calls_left: number, code };
        std::mem::replace(&mut self.wish, wish).calls_left == 0
    }

    pub(crate) fn live(&self) -> usize {
        self.memory.live()
            + self.streams.len()
            + self.events.len()
            + self.modules.len()
            + self.graphs.len()
            + self.executables.len()
            + self.retained
    }
}

/// A call that is to fail.
#[derive(Default)]
struct Wish {
    function: String,
    /// Calls of the function until then; 0: it has failed.
    calls_left: u32,
    code: Code,
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);

pub(crate) fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One call of a function.
pub(crate) fn call(name: &'static str, body: impl FnOnce(&mut State) -> Result<(), Code>) -> Code {
    let mut state = lock();
    if let Some(code) = state.wish.due(name) {
        return code;
    }
    if let Some(code) = state.lost {
        return code;
    }
    body(&mut state).err().unwrap_or(0)
}

impl Wish {
    fn due(&mut self, name: &str) -> Option<Code> {
        if self.calls_left == 0 || self.function != name {
            return None;
        }
        self.calls_left -= 1;
        (self.calls_left == 0).then_some(self.code)
    }
}
