//! Everything that a process has asked for.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

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
    calls: HashMap<&'static str, u32>,
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

/// Which call of which function fails, and how.
static FAIL: LazyLock<Option<(String, u32, Code)>> = LazyLock::new(|| {
    let wish = std::env::var("FAKE_DRIVER_FAIL").ok()?;
    let mut parts = wish.split(':');
    let name = parts.next()?.to_owned();
    let number = parts.next()?.parse().ok()?;
    let code = parts.next().map_or(Some(OUT_OF_MEMORY), |code| code.parse().ok())?;
    Some((name, number, code))
});

static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);

/// One call of a function.
pub(crate) fn call(name: &'static str, body: impl FnOnce(&mut State) -> Result<(), Code>) -> Code {
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((function, number, code)) = &*FAIL
        && function == name
    {
        let calls = state.calls.entry(name).or_default();
        *calls += 1;
        if calls == number {
            return *code;
        }
    }
    if let Some(code) = state.lost
        && name != "fakeDriverLive"
    {
        return code;
    }
    body(&mut state).err().unwrap_or(0)
}
