package Flaky;

# A socket before a host's, which passes requests on, and does to some of them what a bad day does.

use strict;
use warnings;

use IO::Socket::UNIX;
use POSIX ();
use Socket qw(SOL_SOCKET SO_PEERCRED);

# Listens at `$dir/api.sock` before the host at `$real`. Of each request, `$plan` is asked by its method, its path, and how
# many of that kind came so far; it says what becomes of it:
#   pass     it is passed on, and so is the answer
#   lose     it is carried out, and the answer is lost
#   forget   the same, and the host knows its key no more: it was started anew
#   kill     who asks is killed before anybody hears of it
# Gives its process, to be ended by `stop`.
sub start {
    my ($real, $dir, $plan) = @_;
    my $listener = IO::Socket::UNIX->new(Local => "$dir/api.sock", Listen => 16) or die "$dir/api.sock: $!\n";
    my $pid = fork() // die "fork: $!\n";
    return $pid if $pid;
    local $SIG{PIPE} = 'IGNORE';
    my (%count, $forgets);
    while (my $client = $listener->accept()) {
        my ($head, $body) = request_of($client) or next;
        my ($method, $path) = $head =~ m{\A([A-Z]+) (\S+) };
        my $kind = "$method $path";
        my $fate = $plan->($method, $path, ++$count{$kind});
        if ($fate eq 'kill') {
            my ($asker) = unpack('i3', getsockopt($client, SOL_SOCKET, SO_PEERCRED));
            kill('KILL', $asker =~ /\A([0-9]+)\z/);
            next;
        }
        $head =~ s/^Idempotency-Key:[^\n]*\n//mi if $forgets;
        $forgets ||= $fate eq 'forget';
        my $answer = answer_of($real, $head . $body);
        print {$client} $answer if $fate eq 'pass';
        close($client);
    }
    POSIX::_exit(0);
}

sub request_of {
    my ($client) = @_;
    my $text = '';
    while ($text !~ /\r\n\r\n/) {
        sysread($client, $text, 65536, length($text)) or return;
    }
    my ($head, $body) = $text =~ /\A(.*?\r\n\r\n)(.*)\z/s;
    my ($length) = $head =~ /^Content-Length: ([0-9]+)/mi;
    while (length($body) < ($length // 0)) {
        sysread($client, $body, 65536, length($body)) or return;
    }
    return ($head, $body);
}

sub answer_of {
    my ($real, $request) = @_;
    my $host = IO::Socket::UNIX->new(Peer => $real) or return '';
    print {$host} $request;
    $host->flush();
    local $/;
    return scalar(<$host>) // '';
}

sub stop {
    my ($pid) = @_;
    kill('TERM', $pid);
    waitpid($pid, 0);
    return;
}

1;
