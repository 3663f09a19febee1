package Holdfast::Client;

# Asks a host of a grid over its unix socket: HTTP as docs/reference/openapi.json has it, one request a connection.
#
# A change has one Idempotency-Key for all its attempts, so it is carried out once, however often it has to be sent. A host
# that was started anew has forgotten the keys. So a refusal after a broken attempt says that (`again`), and who asked
# looks at what there is.
#
# Runs under taint mode: no program is started, and the socket's path is checked.

use strict;
use warnings;

use HTTP::Tiny;
use IO::Socket::UNIX;
use Time::HiRes qw(sleep time);

# Answers about a thousand volumes are large: the one in C, where it is there.
my $json_class = eval { require JSON::XS; 1 } ? 'JSON::XS' : do { require JSON::PP; 'JSON::PP' };
my $json = $json_class->new->utf8->canonical;

# Seconds. A host answers looks within 15, changes within 150, and says what goes on by then.
my $LOOK_TIMEOUT = 20;
my $CHANGE_TIMEOUT = 160;

# For so many seconds a change is sent again that may succeed later: a host that is lost is known to be so by then.
my $PATIENCE = 30;
my $PAUSE = 0.5;

# Takes `dir`, the grid's directory.
sub new {
    my ($class, %given) = @_;
    my ($dir) = ($given{dir} // '') =~ m{\A(/[^\0\n]*)\z}
        or die "the directory of the grid has to be an absolute path: set holdfast-dir\n";
    $dir =~ s{/+\z}{};
    return bless { dir => $dir, socket => "$dir/api.sock" }, $class;
}

sub dir {
    my ($self) = @_;
    return $self->{dir};
}

# A part of a path, as it is sent.
sub escaped {
    my ($text) = @_;
    $text =~ s/([^A-Za-z0-9._~-])/sprintf('%%%02X', ord($1))/ge;
    return $text;
}

# What there is at a path. Options, in seconds: `timeout`, and `patience` with what may succeed later. Gives the answer, or
# nothing and why: a hash of `code`, `message`.
sub look {
    my ($self, $path, %options) = @_;
    return $self->_until($options{patience} // 0, sub { $self->_once('GET', $path, undef, {}, $options{timeout} // $LOOK_TIMEOUT) });
}

# Changes something; `body` may be missing. Gives as `look` does; `again` says that an earlier attempt may have done it.
sub change {
    my ($self, $method, $path, $body) = @_;
    my $headers = { 'Idempotency-Key' => _key() };
    return $self->_until($PATIENCE, sub { $self->_once($method, $path, $body, $headers, $CHANGE_TIMEOUT) });
}

# The answer of one of these, or the end with the text for people.
sub told {
    my ($self, $answer, $problem) = @_;
    die "$problem->{message}\n" if $problem;
    return $answer;
}

sub _key {
    open(my $file, '<', '/proc/sys/kernel/random/uuid') or die "no random numbers to be had: $!\n";
    my $line = <$file>;
    close($file) or die "no random numbers to be had: $!\n";
    my ($key) = $line =~ /\A([0-9a-f-]{36})\n\z/ or die "no random numbers to be had\n";
    return $key;
}

sub _until {
    my ($self, $patience, $once) = @_;
    my ($end, $broke) = (time() + $patience, 0);
    while (1) {
        my ($answer, $problem) = $once->();
        return ($answer) if !$problem;
        if (!$problem->{passes} || time() >= $end) {
            $problem->{again} = $broke;
            return (undef, $problem);
        }
        $broke ||= $problem->{broke};
        sleep($PAUSE);
    }
}

sub _once {
    my ($self, $method, $path, $body, $headers, $timeout) = @_;
    my %given = (headers => {%$headers});
    if (defined($body)) {
        $given{content} = $json->encode($body);
        $given{headers}->{'Content-Type'} = 'application/json';
    }
    my $http = Holdfast::Client::Socket->new(
        timeout => $timeout,
        max_redirect => 0,
        keep_alive => 0,
        # Whatever the environment says.
        proxy => undef,
        http_proxy => undef,
        https_proxy => undef,
    );
    $http->{holdfast_socket} = $self->{socket};
    my $response = $http->request($method, "http://host$path", \%given);
    my $status = $response->{status};
    if ($status == 599) {
        my ($why) = $response->{content} =~ /\A([^\n]*)/;
        my $could_not = $http->{holdfast_connected} ? 'did not answer' : 'can not be reached';
        my $message = "the host of the grid at $self->{dir} $could_not ($why); is it up? `holdfast grid up`";
        my $broke = $http->{holdfast_connected} ? 1 : 0;
        return (undef, { code => 'unavailable', message => $message, passes => 1, broke => $broke });
    }
    my $content = $response->{content} // '';
    my $answer = $content eq '' ? undef : eval { $json->decode($content) };
    return ($answer // {}) if $response->{success};
    my $error = ref($answer) eq 'HASH' && ref($answer->{error}) eq 'HASH' ? $answer->{error} : {};
    my $passes = exists($response->{headers}->{'retry-after'});
    my ($code) = ($error->{code} // 'failed') =~ /\A([a-z-]+)\z/;
    my $message = $error->{message} // "the host answers $status to $method $path";
    return (undef, { code => $code // 'failed', message => $message, passes => $passes });
}

# HTTP::Tiny by a socket of this machine.
package Holdfast::Client::Socket;

our @ISA = ('HTTP::Tiny');

sub _open_handle {
    my ($self, $request, $scheme, $host, $port, $peer) = @_;
    my $handle = HTTP::Tiny::Handle->new(timeout => $self->{timeout}, keep_alive => 0);
    $handle->{fh} = IO::Socket::UNIX->new(Peer => $self->{holdfast_socket}, Timeout => $self->{timeout})
        or die "$self->{holdfast_socket}: $!\n";
    binmode($handle->{fh}) or die "$self->{holdfast_socket}: $!\n";
    @{$handle}{qw(scheme host port peer pid tid)} = ($scheme, $host, $port, $peer, $$, 0);
    $self->{holdfast_connected} = 1;
    return $handle;
}

1;
