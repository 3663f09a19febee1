//! Serving one open export: requests in, replies out, in whatever order the volume answers.
//!
//! Role: checks each request against the export's terms, answers what it can by itself, passes the rest on.
//!
//! Policy where the protocol leaves a choice
//! - Requests of no bytes succeed without reaching the volume, if they are valid otherwise; a status of no bytes is
//!   invalid, since its answer must describe something.
//! - A write that is refused still carries its payload: it is read and dropped up to [`DRAIN_BYTES_MAX`]; a longer one
//!   closes the connection.
//! - A read beyond [`PAYLOAD_BYTES_MAX`] is `EOVERFLOW` where structured replies tell the client that smaller reads
//!   would work, `EINVAL` otherwise. Requests without payload may be as long as the protocol can say.
//! - Replies to reads are one chunk: a hole if every byte is zero, else data. So `DF` asks for nothing more.
//! - In structured mode errors are chunks with a text, successes without payload are simple replies.
//! - Zeroing unmaps, which is always fast, and `FAST_ZERO` is met. `NO_HOLE` is accepted and makes no difference: a
//!   volume that never overwrites in place can't keep space for a block by writing zeroes to it.

#[cfg(test)]
mod tests;

use super::contexts::Context;
use super::wire::{self, Command, Cookie, Errno, REQUEST_HEADER_BYTES, RequestHeader, command_flag};
use super::{Effect, Outbox, Step, gather};
use holdfast_base::buf::total_len;
use holdfast_base::stream::SINK_BYTES_MIN;
use holdfast_base::{
    BlockData, BlockError, BlockOp, BlockReply, BlockRequest, Buf, BufMut, ByteRange, RequestToken, Slab, StatusExtent,
    Token,
};

/// Most bytes that a read or a write moves: what clients may assume if nothing else is negotiated.
pub const PAYLOAD_BYTES_MAX: u32 = 32 << 20;

/// Longest payload of a refused write that is read and dropped; a longer one is taken for an attack, or a lost frame.
pub const DRAIN_BYTES_MAX: u32 = 64 << 20;

/// Most extents in a status reply, which then takes half a MiB.
pub const STATUS_EXTENTS_MAX: usize = 64 << 10;

/// What the session agreed to serve.
#[derive(Clone, Debug)]
pub(super) struct Terms {
    pub size_bytes: u64,
    pub read_only: bool,
    pub structured: bool,
    /// The metadata contexts that the client selected for this export.
    pub contexts: Vec<Context>,
}

/// A request that the volume holds.
#[derive(Clone, Copy)]
struct Pending {
    command: Command,
    cookie: Cookie,
    offset: u64,
    len: u32,
    req_one: bool,
    /// Of a block status: which of the contexts is asked for.
    context: usize,
}

impl Pending {
    fn new(command: Command, header: RequestHeader) -> Pending {
        let RequestHeader { flags, cookie, offset, len, .. } = header;
        Pending { command, cookie, offset, len, req_one: flags & command_flag::REQ_ONE != 0, context: 0 }
    }

    /// Memory that the request or its reply takes until it is answered.
    fn held_bytes(&self) -> u64 {
        match self.command {
            Command::Read | Command::Write => u64::from(self.len),
            Command::BlockStatus if !self.req_one => 8 * STATUS_EXTENTS_MAX as u64,
            _ => 0,
        }
    }
}

enum Input {
    Header,
    /// The payload of a valid write.
    Payload {
        pending: Pending,
        data: BufMut,
        filled: usize,
    },
    /// The same, while the shell has its buffer.
    Lent {
        pending: Pending,
    },
    /// The payload of a refused one.
    Dropping {
        rest_bytes: u32,
        cookie: Cookie,
        refusal: Refusal,
    },
}

/// Why a request is answered without the volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Refusal {
    UnknownCommand,
    Flags,
    ReadOnly,
    OutOfRange(Command),
    WriteTooLong,
    ReadTooLong { structured: bool },
    FlushRange,
    NoContext,
    EmptyStatus,
}

impl Refusal {
    fn errno(self) -> Errno {
        match self {
            Refusal::ReadOnly => Errno::Perm,
            Refusal::OutOfRange(command) => errno_of(command, BlockError::OutOfRange),
            Refusal::ReadTooLong { structured: true } => Errno::Overflow,
            Refusal::UnknownCommand
            | Refusal::Flags
            | Refusal::WriteTooLong
            | Refusal::ReadTooLong { structured: false }
            | Refusal::FlushRange
            | Refusal::NoContext
            | Refusal::EmptyStatus => Errno::Inval,
        }
    }

    fn text(self) -> &'static str {
        match self {
            Refusal::UnknownCommand => "the server does not know this command",
            Refusal::Flags => "the command does not take these flags",
            Refusal::ReadOnly => "the export is read-only",
            Refusal::OutOfRange(_) => "the request reaches beyond the end of the export",
            Refusal::WriteTooLong | Refusal::ReadTooLong { .. } => "the request moves more than 32 MiB: split it",
            Refusal::FlushRange => "a flush covers the whole export: its offset and length must be zero",
            Refusal::NoContext => "no metadata context was selected for this export",
            Refusal::EmptyStatus => "a status of no bytes has no answer",
        }
    }
}

/// What the client is told of a request that failed in the volume.
fn errno_of(command: Command, error: BlockError) -> Errno {
    match error {
        BlockError::OutOfRange => match command {
            Command::Write | Command::WriteZeroes => Errno::NoSpace,
            Command::Read
            | Command::Disconnect
            | Command::Flush
            | Command::Trim
            | Command::Cache
            | Command::BlockStatus => Errno::Inval,
        },
        BlockError::NoSpace => Errno::NoSpace,
        BlockError::Unavailable | BlockError::Injected => Errno::Io,
        // The client must disconnect on this, and finds the new owner when it connects again.
        BlockError::Deposed | BlockError::ShuttingDown => Errno::Shutdown,
        BlockError::Invalid => Errno::Inval,
        BlockError::NotWriter => Errno::Perm,
    }
}

pub(super) struct Transmission {
    terms: Terms,
    input: Input,
    /// Bytes of the request header being gathered.
    head: Vec<u8>,
    pending: Slab<Pending>,
    /// Sum of what pending requests, and a payload on its way in, hold.
    pending_bytes: u64,
    draining: bool,
}

impl Transmission {
    pub(super) fn new(terms: Terms, in_flight_max: usize) -> Transmission {
        Transmission {
            terms,
            input: Input::Header,
            head: Vec::with_capacity(REQUEST_HEADER_BYTES),
            pending: Slab::new(in_flight_max),
            pending_bytes: 0,
            draining: false,
        }
    }

    pub(super) fn in_flight(&self) -> usize {
        self.pending.len()
    }

    pub(super) fn in_flight_bytes(&self) -> u64 {
        self.pending_bytes
    }

    pub(super) fn wants_input(&self, room_bytes: u64) -> bool {
        !self.draining && (!self.between_requests() || self.may_start(room_bytes))
    }

    fn between_requests(&self) -> bool {
        matches!(self.input, Input::Header) && self.head.is_empty()
    }

    /// Whether another request may come in. Asked before its first byte, so that what has started is finished.
    fn may_start(&self, room_bytes: u64) -> bool {
        !self.pending.is_full() && self.pending_bytes < room_bytes
    }

    /// Bytes of the client, while replies unsent leave `room_bytes` for requests in flight.
    pub(super) fn on_bytes(&mut self, bytes: &[u8], room_bytes: u64, out: &mut Outbox<'_>) -> Step {
        if self.draining {
            return Step::Taken(bytes.len());
        }
        match &mut self.input {
            Input::Header => {
                if self.head.is_empty() && !self.may_start(room_bytes) {
                    return Step::Waiting;
                }
                let count = gather(&mut self.head, REQUEST_HEADER_BYTES, bytes);
                let Some(fixed) = self.head.first_chunk() else { return Step::Taken(count) };
                let Some(header) = wire::decode_request(fixed) else { return Step::Close };
                self.head.clear();
                self.on_header(header, out).unwrap_or(Step::Taken(count))
            }
            Input::Payload { data, filled, .. } => {
                let count = bytes.len().min(data.len() - *filled);
                data[*filled..*filled + count].copy_from_slice(&bytes[..count]);
                *filled += count;
                if *filled == data.len() {
                    self.finish_payload(out);
                }
                Step::Taken(count)
            }
            Input::Lent { .. } => panic!("the buffer is lent: bytes belong in it"),
            Input::Dropping { rest_bytes, cookie, refusal } => {
                let count = bytes.len().min(*rest_bytes as usize);
                *rest_bytes -= count as u32;
                if *rest_bytes == 0 {
                    let (cookie, refusal) = (*cookie, *refusal);
                    self.input = Input::Header;
                    self.refuse(cookie, refusal, out);
                }
                Step::Taken(count)
            }
        }
    }

    pub(super) fn take_sink(&mut self) -> Option<(BufMut, usize)> {
        let lends = |data: &BufMut, filled: usize| data.len() - filled >= SINK_BYTES_MIN;
        if self.draining || !matches!(&self.input, Input::Payload { data, filled, .. } if lends(data, *filled)) {
            return None;
        }
        let input = std::mem::replace(&mut self.input, Input::Header);
        let Input::Payload { pending, data, filled } = input else { unreachable!("just seen") };
        self.input = Input::Lent { pending };
        Some((data, filled))
    }

    /// The buffer is back. Once draining has begun, a write that came too late is not done.
    pub(super) fn give_sink(&mut self, data: BufMut, filled: usize, out: &mut Outbox<'_>) {
        let Input::Lent { pending } = &self.input else { panic!("no sink was lent") };
        assert!(filled <= data.len(), "{filled} bytes in a sink of {}", data.len());
        let is_full = filled == data.len();
        self.input = Input::Payload { pending: *pending, data, filled };
        if is_full && !self.draining {
            self.finish_payload(out);
        }
    }

    fn finish_payload(&mut self, out: &mut Outbox<'_>) {
        let input = std::mem::replace(&mut self.input, Input::Header);
        let Input::Payload { pending, data, .. } = input else { panic!("no payload is under way") };
        // The same bytes are counted again as they enter flight.
        self.pending_bytes -= pending.held_bytes();
        self.pass_on(pending, BlockOp::Write { offset: pending.offset, data: data.freeze() }, out);
    }

    /// Takes one request. Returns a step only where the session ends.
    fn on_header(&mut self, header: RequestHeader, out: &mut Outbox<'_>) -> Option<Step> {
        let RequestHeader { cookie, len, .. } = header;
        if header.command == Some(Command::Disconnect) {
            return self.drain();
        }
        let checked = self.check(header);
        if header.command == Some(Command::Write) && len > 0 {
            if len > DRAIN_BYTES_MAX {
                return Some(Step::Close);
            }
            self.input = match checked {
                Ok(command) => {
                    let pending = Pending::new(command, header);
                    self.pending_bytes += pending.held_bytes();
                    Input::Payload { pending, data: BufMut::new(len as usize), filled: 0 }
                }
                Err(refusal) => Input::Dropping { rest_bytes: len, cookie, refusal },
            };
            return None;
        }
        let command = match checked {
            Ok(command) => command,
            Err(refusal) => {
                self.refuse(cookie, refusal, out);
                return None;
            }
        };
        let range = ByteRange::new(header.offset, u64::from(len));
        let op = match command {
            Command::Flush => BlockOp::Flush,
            _ if len == 0 => {
                self.succeed_with_nothing(command, cookie, out);
                return None;
            }
            Command::Read => BlockOp::Read(range),
            Command::Trim => BlockOp::Discard(range),
            Command::Cache => BlockOp::Prefetch(range),
            Command::WriteZeroes => BlockOp::WriteZeroes(range),
            Command::BlockStatus => self.terms.contexts[0].op(range),
            Command::Write | Command::Disconnect => unreachable!("dealt with above"),
        };
        self.pass_on(Pending::new(command, header), op, out);
        None
    }

    /// The one place that decides what may reach the volume (invariant 3 of the session).
    fn check(&self, header: RequestHeader) -> Result<Command, Refusal> {
        let RequestHeader { flags, offset, len, .. } = header;
        let command = header.command.ok_or(Refusal::UnknownCommand)?;
        if flags & !self.flags_of(command) != 0 {
            return Err(Refusal::Flags);
        }
        if command == Command::Flush {
            return if offset == 0 && len == 0 { Ok(command) } else { Err(Refusal::FlushRange) };
        }
        let changes = matches!(command, Command::Write | Command::Trim | Command::WriteZeroes);
        if changes && self.terms.read_only {
            return Err(Refusal::ReadOnly);
        }
        if command == Command::BlockStatus && self.terms.contexts.is_empty() {
            return Err(Refusal::NoContext);
        }
        if ByteRange::new(offset, u64::from(len)).end().is_none_or(|end| end > self.terms.size_bytes) {
            return Err(Refusal::OutOfRange(command));
        }
        match command {
            Command::Write if len > PAYLOAD_BYTES_MAX => Err(Refusal::WriteTooLong),
            Command::Read if len > PAYLOAD_BYTES_MAX => Err(Refusal::ReadTooLong { structured: self.terms.structured }),
            Command::BlockStatus if len == 0 => Err(Refusal::EmptyStatus),
            _ => Ok(command),
        }
    }

    /// FUA may come with any command; every acknowledged write is durable, so that it asks for nothing more.
    fn flags_of(&self, command: Command) -> u16 {
        command_flag::FUA
            | match command {
                Command::Read if self.terms.structured => command_flag::DF,
                Command::WriteZeroes => command_flag::NO_HOLE | command_flag::FAST_ZERO,
                Command::BlockStatus => command_flag::REQ_ONE,
                Command::Read
                | Command::Write
                | Command::Disconnect
                | Command::Flush
                | Command::Trim
                | Command::Cache => 0,
            }
    }

    fn pass_on(&mut self, pending: Pending, op: BlockOp, out: &mut Outbox<'_>) {
        self.pending_bytes += pending.held_bytes();
        let token = RequestToken(self.pending.insert(pending).0);
        out.push(Effect::Request(BlockRequest { token, op }));
    }

    /// Takes a pending request out as its reply comes.
    fn settle(&mut self, token: RequestToken) -> Pending {
        let pending = self.pending.remove(Token(token.0)).expect("a request gets one reply");
        self.pending_bytes -= pending.held_bytes();
        pending
    }

    /// A reply that no one waits for any more.
    pub(super) fn forget(&mut self, token: RequestToken) {
        self.settle(token);
    }

    pub(super) fn on_reply(&mut self, reply: BlockReply, out: &mut Outbox<'_>) -> Step {
        let pending = self.settle(reply.token);
        let Pending { command, cookie, .. } = pending;
        match (command, reply.result) {
            (_, Err(error)) => self.fail(cookie, errno_of(command, error), &error.to_string(), out),
            (Command::Read, Ok(BlockData::Data(data))) => self.send_data(pending, data, out),
            (Command::BlockStatus, Ok(BlockData::Status(extents))) => self.on_status(pending, &extents, out),
            (Command::Read | Command::BlockStatus, Ok(other)) => panic!("{other:?} answers a {command:?}"),
            (_, Ok(BlockData::Done)) => out.send(wire::simple_reply(cookie, None)),
            (_, Ok(other)) => panic!("{other:?} answers a {command:?}"),
        }
        self.end_of_draining().unwrap_or(Step::Taken(0))
    }

    /// The next of the contexts is asked for when the one before it is told.
    fn on_status(&mut self, pending: Pending, extents: &[StatusExtent], out: &mut Outbox<'_>) {
        let next = Pending { context: pending.context + 1, ..pending };
        let following = self.terms.contexts.get(next.context).copied();
        send_status(pending, self.terms.contexts[pending.context], following.is_none(), extents, out);
        if let Some(context) = following {
            self.pass_on(next, context.op(ByteRange::new(pending.offset, u64::from(pending.len))), out);
        }
    }

    pub(super) fn on_shutdown(&mut self) -> Step {
        if self.draining {
            return Step::Taken(0);
        }
        self.drain().unwrap_or(Step::Taken(0))
    }

    fn drain(&mut self) -> Option<Step> {
        self.draining = true;
        self.end_of_draining()
    }

    fn end_of_draining(&self) -> Option<Step> {
        (self.draining && self.pending.is_empty()).then_some(Step::Close)
    }

    fn succeed_with_nothing(&self, command: Command, cookie: Cookie, out: &mut Outbox<'_>) {
        // A read must be answered in kind once structured replies are agreed on.
        let chunk = self.terms.structured && command == Command::Read;
        out.send(if chunk { wire::none_chunk(cookie) } else { wire::simple_reply(cookie, None) });
    }

    fn refuse(&self, cookie: Cookie, refusal: Refusal, out: &mut Outbox<'_>) {
        self.fail(cookie, refusal.errno(), refusal.text(), out);
    }

    fn fail(&self, cookie: Cookie, error: Errno, text: &str, out: &mut Outbox<'_>) {
        if self.terms.structured {
            out.send(wire::error_chunk(cookie, error, text));
            out.send_buf(Buf::copy_from(text.as_bytes()));
        } else {
            out.send(wire::simple_reply(cookie, Some(error)));
        }
    }

    fn send_data(&self, pending: Pending, data: Vec<Buf>, out: &mut Outbox<'_>) {
        let Pending { cookie, offset, len, .. } = pending;
        assert!(total_len(&data) == len as usize, "{} bytes answer a read of {len}", total_len(&data));
        if !self.terms.structured {
            out.send(wire::simple_reply(cookie, None));
        } else if data.iter().all(|buf| is_zero(buf)) {
            out.send(wire::hole_chunk(cookie, offset, len));
            return;
        } else {
            out.send(wire::data_chunk(cookie, offset, len));
        }
        data.into_iter().for_each(|buf| out.send_buf(buf));
    }
}

/// Sends the extents as far as the request reaches: neighbours of one state as one, a single one if that was asked for.
fn send_status(pending: Pending, context: Context, is_last: bool, extents: &[StatusExtent], out: &mut Outbox<'_>) {
    let Pending { cookie, len, req_one, .. } = pending;
    let mut rest = u64::from(len);
    let mut descriptors: Vec<(u32, u32)> = Vec::new();
    for extent in extents {
        let count = extent.len.min(rest) as u32;
        let state = context.state(extent.set);
        rest -= u64::from(count);
        if count == 0 {
            continue;
        }
        let described = descriptors.len();
        match descriptors.last_mut() {
            Some((last_len, last_state)) if *last_state == state => *last_len += count,
            Some(_) if req_one || described == STATUS_EXTENTS_MAX => break,
            _ => descriptors.push((count, state)),
        }
    }
    assert!(!descriptors.is_empty(), "the status of {len} bytes describes at least one");
    let head = wire::status_chunk(cookie, pending.context as u32 + 1, is_last, descriptors.len() as u32);
    if let [(extent_len, state)] = descriptors[..] {
        out.send(head.u32(extent_len).u32(state));
        return;
    }
    let mut bytes = BufMut::new(8 * descriptors.len());
    for (at, (extent_len, state)) in bytes.chunks_exact_mut(8).zip(descriptors) {
        at[..4].copy_from_slice(&extent_len.to_be_bytes());
        at[4..].copy_from_slice(&state.to_be_bytes());
    }
    out.send(head);
    out.send_buf(bytes.freeze());
}

/// Looks at whole cache lines at a time, and no further than the first byte that isn't zero.
fn is_zero(bytes: &[u8]) -> bool {
    let (lines, rest) = bytes.as_chunks::<64>();
    lines.iter().all(|line| line.iter().fold(0, |seen, byte| seen | byte) == 0) && rest.iter().all(|byte| *byte == 0)
}
